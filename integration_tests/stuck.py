"""How runs end when one of two processes fails, or gets stuck.

    python integration_tests/stuck.py --backend torch
    python integration_tests/stuck.py --backend jax --case stop_save --runs 5

Each case is a run of `stuck_script.py`. One line says how long it was from
the fault until all processes were gone, the exit code, and what the launcher
said first. The exit code of this script is the number of cases that failed.
"""

import argparse
import collections
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import time

HERE = pathlib.Path(__file__).parent
if __name__ == "__main__":
    sys.path.insert(0, str(HERE.parent))

from integration_tests import launching

SCRIPT = str(HERE / "stuck_script.py")
# How long processes wait for each other in these runs, in seconds.
TIMEOUT_S = 10
SOON, STUCK, ENDED = 5, TIMEOUT_S + 15, TIMEOUT_S
KILLED = r"First error, process 1 of 2:\nIt was ended by SIGKILL"
FIRST = r"First error, process 1 of 2:\nTraceback[\s\S]*"
RAISED = FIRST + "ValueError: the first error"
MEMORY = FIRST + "(MemoryError|Unable to allocate)"
BLAMED = r"First error[\s\S]*[Pp]rocess 1 is stuck in "


class Case(collections.namedtuple("Case", ["seconds", "code", "said"])):
    """What has to happen.

    Args:
        seconds: Float, time from the fault to the end of all processes.
        code: Int, the exit code of the launcher; `None` for any but 0.
        said: String, pattern of what the launcher has to say last.
    """


CASES = {
    "kill_callback": Case(SOON, 137, KILLED),
    "kill_source": Case(SOON, 137, KILLED),
    "kill_save": Case(SOON, 137, KILLED),
    "kill_build": Case(SOON, 137, KILLED),
    "kill_script": Case(SOON, 137, KILLED),
    "loop_callback": Case(STUCK, 1, BLAMED + r"`on_train_batch_end`"),
    "loop_step_of_0": Case(
        STUCK, 1, r"[Pp]rocess 0 is stuck in batch .*at \S*stuck_script\.py"
    ),
    "sleep_source": Case(STUCK, 1, BLAMED + "its data source"),
    "sleep_script": Case(STUCK, 1, r"[Pp]rocess 1 is stuck in the script"),
    "stop_callback": Case(STUCK, 1, "[Pp]rocess 1 does not answer"),
    "stop_save": Case(STUCK, 1, "[Pp]rocess 1 does not answer"),
    "exit0_callback": Case(
        ENDED, 1, "[Pp]rocess 1 left with exit code 0 while .*`fit`"
    ),
    "osexit0_callback": Case(ENDED, 1, "[Pp]rocess 1 has ended.*while .*`fit`"),
    "end_source": Case(STUCK, 1, "First error.*[\\s\\S]*the end of the data"),
    "memory_callback": Case(SOON, 1, MEMORY),
    "raise_callback": Case(SOON, 1, RAISED),
    "raise_build": Case(SOON, 1, RAISED),
    "raise_evaluate": Case(SOON, 1, RAISED),
    "raise_predict": Case(SOON, 1, RAISED),
    "raise_epoch": Case(SOON, 1, RAISED),
    "term_callback": Case(
        2 * SOON, 143, r"First error, process 1 of 2:\nIt was ended by SIGTERM"
    ),
    "launcherterm_callback": Case(2 * SOON, 143, ""),
    "launcherint_callback": Case(2 * SOON, 130, ""),
    "launcherkill_callback": Case(SOON, -9, ""),
}


def _of_first(case):
    """Returns a case in which process 0 is the one that fails."""
    return case._replace(said=case.said.replace("rocess 1", "rocess 0"))


# Process 0 also has the store, and hears where the others are.
CASES |= {
    f"{name}_of_0": _of_first(CASES[name])
    for name in (
        "kill_callback",
        "kill_save",
        "loop_callback",
        "stop_callback",
        "stop_save",
        "exit0_callback",
        "osexit0_callback",
        "raise_callback",
        "term_callback",
    )
}


def cases(backend):
    """Returns the names of the cases of a backend."""
    # DTensor runs no code of the host inside of a step.
    left_out = ("loop_step_of_0",) if backend == "tensorflow" else ()
    return [case for case in CASES if case not in left_out]


class Outcome(
    collections.namedtuple("Outcome", ["case", "seconds", "code", "errors"])
):
    """How a run ended.

    Args:
        case: String, name of the case.
        seconds: Float, time from the fault to the end of all processes;
            `None` if they did not end.
        code: Int, exit code of the launcher.
        errors: String, what was written to stderr.
    """

    @property
    def said(self):
        """What the launcher said last."""
        return "First error" + self.errors.rpartition("First error")[2]

    def problem(self, slack=0):
        """Returns what is not as it has to be; an empty string if all is.

        Args:
            slack: Float, seconds that a run may take longer. Defaults to 0.
        """
        case = CASES[self.case]
        if self.seconds is None:
            return "still running"
        if self.seconds > case.seconds + slack:
            return f"took more than {case.seconds} s"
        if self.code != case.code:
            return f"exit code is not {case.code}"
        if not re.search(case.said, self.said):
            return f"does not say {case.said!r}"
        return ""


def run(case, backend, folder, slack=0):
    """Runs a case, and returns its `Outcome`.

    Args:
        case: String, its name.
        backend: String, Keras's backend.
        folder: `pathlib.Path` of an empty folder.
        slack: Float, seconds that a run may take longer. Defaults to 0.
    """
    several = [] if backend == "torch" else ["--processes", "2"]
    errors = folder / "stderr.txt"
    with open(errors, "w") as file:
        launcher = subprocess.Popen(
            [
                *(sys.executable, "-m", "keras_tp.launch", "--devices", "2"),
                *(*several, SCRIPT, case, str(folder)),
            ],
            env=launching.environment(
                KERAS_BACKEND=backend,
                KERAS_TP_TIMEOUT=str(TIMEOUT_S),
                OMP_NUM_THREADS="1",
            ),
            stderr=file,
        )
    try:
        ended = _wait(launcher, folder, STUCK + slack + 10)
    finally:
        launcher.kill()
        for process in launching.running(str(folder)):
            os.kill(process, signal.SIGKILL)
    code = launcher.wait()
    began = folder / "began"
    if ended is None or not began.exists():
        # The fault did not happen, or the processes did not end.
        return Outcome(case, None, code, errors.read_text())
    seconds = ended - began.stat().st_mtime
    return Outcome(case, seconds, code, errors.read_text())


def _wait(launcher, folder, seconds):
    """Returns when all processes were gone; `None` if they do not go."""
    began = folder / "began"
    started = time.time()
    while True:
        time.sleep(0.1)
        is_over = launcher.poll() is not None
        if is_over and not launching.running(str(folder)):
            return time.time()
        start = began.stat().st_mtime if began.exists() else started + 120
        if time.time() - start > seconds:
            return None


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--backend", choices=["jax", "tensorflow", "torch"], required=True)
    add("--case", choices=list(CASES), action="append")
    add("--runs", type=int, default=1)
    add("--errors", action="store_true", help="print all that was said")
    options = parser.parse_args()
    failed = 0
    print(f"| {options.backend} | seconds | exit code | said first | |")
    print("|---|---|---|---|---|")
    for case in options.case or cases(options.backend):
        for _ in range(options.runs):
            with tempfile.TemporaryDirectory() as folder:
                outcome = run(case, options.backend, pathlib.Path(folder))
            failed += bool(outcome.problem())
            took = outcome.seconds
            said = " ".join(outcome.said.split())[:200]
            print(
                f"| {case} | {'-' if took is None else f'{took:.1f}'} "
                f"| {outcome.code} | {said} | {outcome.problem() or 'ok'} |",
                flush=True,
            )
            if options.errors:
                print(outcome.errors, flush=True)
    sys.exit(min(failed, 100))


if __name__ == "__main__":
    main()
