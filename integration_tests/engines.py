"""Runs `examples/engines/train.py` by an engine, and prints what happened.

    python -m integration_tests.engines openmpi [BACKEND...]
    python -m integration_tests.engines slurm [BACKEND...]
    python -m integration_tests.engines ray [BACKEND...]

`shell/engines/` has a script for each engine, which starts its daemons if it
has any. KERAS_TP_ENGINE_PROCESSES says how many processes there are, by default
4; KERAS_TP_ENGINE_CHECKS which checks are made, by default all.
"""

import ast
import os
import pathlib
import re
import secrets
import signal
import subprocess
import sys
import tempfile
import time

from integration_tests import launching

BACKENDS = ("jax", "tensorflow", "torch")
SCRIPT = "examples/engines/train.py"
# The variable with the index of a process.
INDEX = {
    "openmpi": "OMPI_COMM_WORLD_RANK",
    "slurm": "SLURM_PROCID",
    "ray": "KERAS_DISTRIBUTION_PROCESS_ID",
}
COUNT = int(os.environ.get("KERAS_TP_ENGINE_PROCESSES", "4"))
# Seconds in which a run has to start or to end, on a busy machine.
START_S = 300
# Seconds in which all processes end after one is lost.
END_S = 10
# Seconds in which they end if the engine leaves it to them: KERAS_TP_TIMEOUT,
# and what `docs/processes.md` adds.
UNAIDED_S = 60


class Run:
    """A run that an engine has started, and its output so far.

    Args:
        command: List of strings.
        folder: Path of a new folder. It is an argument of the script, so that
            the command of each process names it.
        backend: String, the backend.
    """

    def __init__(self, command, folder, backend):
        folder.mkdir(exist_ok=True)
        self.folder = folder
        self._output = folder / "output"
        with open(self._output, "a") as file:
            self.process = subprocess.Popen(
                command,
                env=environment(backend),
                stdout=file,
                stderr=file,
                start_new_session=True,
            )

    @property
    def output(self):
        return self._output.read_text()

    def has_ended(self):
        """Returns whether the engine says so."""
        return self.process.poll() is not None

    def succeeded(self):
        """Returns whether the engine says so."""
        return self.process.returncode == 0

    def wait_for(self, text):
        """Waits until the output has a text."""
        deadline = time.monotonic() + START_S
        while text not in self.output:
            if self.has_ended() or time.monotonic() > deadline:
                raise AssertionError(f"no {text!r} in:\n{self.output}")
            time.sleep(0.05)

    def processes(self):
        """Returns the ids of the processes that run the script."""
        return [
            number
            for number in launching.running(str(self.folder))
            # Not an engine's command, which names the script as well.
            if re.match(
                rf"[^\0]*python[^\0]*\0{SCRIPT}", _read(number, "cmdline")
            )
        ]

    def process_of(self, variable, index):
        """Returns the id of the process with an index."""
        text = f"{variable}={index}"
        (found,) = (
            number
            for number in self.processes()
            if text in _read(number, "environ").split("\0")
        )
        return found

    def seconds_to_end(self, began):
        """Waits until no process is left; returns the seconds."""
        deadline = time.monotonic() + START_S
        while not self.has_ended() or self.processes():
            if time.monotonic() > deadline:
                raise AssertionError(f"it goes on:\n{self.output}")
            time.sleep(0.05)
        return time.monotonic() - began

    def send(self, number):
        """Sends a signal to all processes."""
        for found in self.processes():
            try:
                os.kill(found, number)
            except ProcessLookupError:
                continue

    def kill(self):
        """Ends what a failed check has left."""
        self.process.kill()
        self.process.wait()
        self.send(signal.SIGKILL)


class Actors(Run):
    """A run whose processes are actors of Ray."""

    def processes(self):
        return [
            number
            for number in launching.running("ray::Process")
            if INDEX["ray"] in _read(number, "environ")
        ]


class Job(Run):
    """A job of SLURM, whose batch script is that of a backend.

    Args:
        arguments: List of strings, arguments of the script.
        folder: As in `Run`.
        backend: String, the backend.
    """

    def __init__(self, arguments, folder, backend):
        folder.mkdir(exist_ok=True)
        self.folder = folder
        self._output = folder / "output"
        self._output.touch()
        variables = environment(backend)
        # The script says these.
        del variables["KERAS_BACKEND"], variables["KERAS_TP_SECRET"]
        self.number = _said(
            *("sbatch", "--parsable", "--output", self._output),
            *(f"--ntasks-per-node={COUNT // 2}",),
            *(f"examples/slurm/{backend}.sh", *arguments),
            env=variables,
        )

    def state(self):
        """Returns SLURM's word for the state of the job."""
        found = _said("scontrol", "show", "job", self.number)
        return re.search(r"JobState=(\w+)", found)[1]

    def has_ended(self):
        return self.state() not in ("PENDING", "RUNNING", "COMPLETING")

    def succeeded(self):
        return self.state() == "COMPLETED"

    def kill(self):
        subprocess.run(["scancel", self.number])
        self.send(signal.SIGKILL)


def _said(*arguments, env=None):
    """Returns what a command prints."""
    return subprocess.run(
        list(map(str, arguments)),
        env=env,
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        timeout=START_S,
    ).stdout.strip()


def _read(number, name):
    try:
        return pathlib.Path(f"/proc/{number}/{name}").read_text()
    except OSError:
        return ""


def environment(backend):
    """Returns the variables of a run, with one device in each process."""
    # The commands start `python`.
    folder = pathlib.Path(sys.executable).parent
    return launching.environment(
        devices=1,
        PATH=f"{folder}{os.pathsep}{os.environ['PATH']}",
        KERAS_BACKEND=backend,
        KERAS_TP_SECRET=secrets.token_hex(16),
        OMP_NUM_THREADS="1",
        # mpirun refuses both without these.
        OMPI_ALLOW_RUN_AS_ROOT="1",
        OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1",
        OMPI_MCA_rmaps_base_oversubscribe="1",
        # Ray leaves out equal lines of several processes.
        RAY_DEDUP_LOGS="0",
        TF_CPP_MIN_LOG_LEVEL="3",
    )


def start(engine, backend, folder, *arguments):
    """Starts the script by an engine, and returns the run."""
    arguments = [*map(str, arguments), "--backup", str(folder)]
    if engine == "ray":
        return start_printed(engine, backend, folder, COUNT, *arguments)
    if engine == "slurm":
        return Job(arguments, folder, backend)
    command = ["mpirun", "-n", str(COUNT), "python", SCRIPT, *arguments]
    return Run(command, folder, backend)


def start_printed(engine, backend, folder, processes, *arguments):
    """Runs the command that `launch --print-env` prints."""
    word = {"openmpi": "mpi"}.get(engine, engine)
    printed = _said(
        *(sys.executable, "-m", "keras_tp.launch", "--print-env", word),
        *("--devices", COUNT, "--processes", processes, SCRIPT, *arguments),
        env=environment(backend),
    )
    if engine != "ray":
        return Run(["bash", "-c", printed], folder, backend)
    folder.mkdir()
    (folder / "run.py").write_text(printed)
    return Actors([sys.executable, folder / "run.py"], folder, backend)


def losses(output):
    """Returns the losses that each process printed, with the devices."""
    found = re.findall(r"(\d+) devices, losses (\[[^\]]*\])", output)
    return [(int(count), ast.literal_eval(values)) for count, values in found]


def one_process(backend, epochs=3):
    """Returns the losses of one process without an engine."""
    result = subprocess.run(
        [sys.executable, SCRIPT, "--epochs", str(epochs)],
        env=environment(backend),
        capture_output=True,
        text=True,
        timeout=START_S,
    )
    assert result.returncode == 0, result.stderr
    ((count, values),) = losses(result.stdout)
    assert count == 1
    return values


def check_losses(engine, backend, folder):
    """Compares all processes with one."""
    want = one_process(backend)
    run = start(engine, backend, folder)
    try:
        run.seconds_to_end(time.monotonic())
        assert run.succeeded(), run.output
        return _compared(run.output, want)
    finally:
        run.kill()


def check_printed(engine, backend, folder):
    """Runs the command that `launch --print-env` prints."""
    processes = COUNT if backend == "torch" else COUNT // 2
    want = one_process(backend)
    arguments = ("--backup", folder)
    run = start_printed(engine, backend, folder, processes, *arguments)
    try:
        run.seconds_to_end(time.monotonic())
        assert run.succeeded(), run.output
        return _compared(run.output, want, processes)
    finally:
        run.kill()


def _compared(output, want, processes=COUNT):
    """Compares the losses of each process with the last ones of another run."""
    found = losses(output)
    assert len(found) == processes, output
    worst = 0.0
    for count, values in found:
        assert count == COUNT and len(values) <= len(want), (found, want)
        for value, other in zip(values, want[-len(values) :]):
            worst = max(worst, abs(value - other) / abs(other))
    assert worst < 1e-5, (found, want)
    return f"same losses ({worst:.0e})"


def check_killed(engine, backend, folder):
    """One process is killed: all end, and the engine names it."""
    victim = COUNT // 2
    run = start(engine, backend, folder, "--epochs", 10**6)
    try:
        run.wait_for("Epoch 3/")
        number = run.process_of(INDEX[engine], victim)
        began = time.monotonic()
        os.kill(number, signal.SIGKILL)
        seconds = run.seconds_to_end(began)
        assert not run.succeeded()
    finally:
        run.kill()
    (said,) = re.findall(NAMES[engine].format(victim), run.output)[:1] or [""]
    assert said, run.output
    assert seconds < END_S, (seconds, run.output)
    return f"all ended in {seconds:.1f} s: {said!r}"


def check_unaided(engine, backend, folder):
    """SLURM lets the other tasks go on: they name the one that was killed."""
    victim = COUNT // 2
    command = ["srun", "--nodes", "2", "--ntasks", str(COUNT)]
    command += ["python", SCRIPT, "--epochs", "1000000", "--backup", folder]
    run = Run(command, folder, backend)
    try:
        run.wait_for("Epoch 3/")
        began = time.monotonic()
        os.kill(run.process_of(INDEX[engine], victim), signal.SIGKILL)
        seconds = run.seconds_to_end(began)
        assert not run.succeeded()
    finally:
        run.kill()
    named = re.findall(
        rf"Process {victim} has ended|process\(es\) \[{victim}\]", run.output
    )
    assert named, run.output
    assert seconds < UNAIDED_S, (seconds, run.output)
    return f"all ended in {seconds:.1f} s: {named[0]!r}"


def check_cancelled(engine, backend, folder):
    """`scancel` ends all processes."""
    run = start(engine, backend, folder, "--epochs", 10**6)
    try:
        run.wait_for("Epoch 3/")
        began = time.monotonic()
        _said("scancel", run.number)
        seconds = run.seconds_to_end(began)
        assert run.state() == "CANCELLED"
    finally:
        run.kill()
    assert seconds < END_S, (seconds, run.output)
    return f"all ended in {seconds:.1f} s"


def check_requeued(engine, backend, folder):
    """A job that starts again goes on from its backup."""
    epochs = 12
    want = one_process(backend, epochs)
    run = start(engine, backend, folder, "--epochs", epochs)
    try:
        run.wait_for("Epoch 5/")
        # It makes no more progress.
        run.send(signal.SIGSTOP)
        _said("scontrol", "requeue", run.number)
        deadline = time.monotonic() + START_S
        while run.state() != "PENDING":
            assert time.monotonic() < deadline, run.state()
            time.sleep(0.05)
        # Otherwise SLURM waits for two minutes.
        _said("scontrol", "update", f"JobId={run.number}", "StartTime=now")
        run.seconds_to_end(time.monotonic())
        assert run.succeeded(), run.output
        assert run.output.count("Epoch 1/") == 1, run.output
        return "resumed, " + _compared(run.output, want)
    finally:
        run.kill()


# What an engine says about a process that was killed.
NAMES = {
    "openmpi": r"process rank {} with PID .* exited on signal 9 \(Killed\)",
    "slurm": r"error: .*: task {}: Killed",
    "ray": r"First error, process {} of \d: The actor died",
}
CHECKS = {
    "openmpi": {
        "losses": check_losses,
        "printed": check_printed,
        "killed": check_killed,
    },
    "ray": {"losses": check_losses, "killed": check_killed},
    "slurm": {
        "losses": check_losses,
        "printed": check_printed,
        "killed": check_killed,
        "unaided": check_unaided,
        "cancelled": check_cancelled,
        "requeued": check_requeued,
    },
}


def main(engine, *backends):
    """Makes the checks; returns the exit code."""
    wanted = os.environ.get("KERAS_TP_ENGINE_CHECKS", "").split()
    failed = False
    print(f"| engine, {COUNT} processes | backend | check | result |")
    print("|---|---|---|---|", flush=True)
    for backend in backends or BACKENDS:
        for name, check in CHECKS[engine].items():
            if wanted and name not in wanted:
                continue
            with tempfile.TemporaryDirectory(prefix="keras_tp_") as folder:
                try:
                    result = check(engine, backend, pathlib.Path(folder, name))
                except (AssertionError, subprocess.TimeoutExpired) as e:
                    failed = True
                    result = "FAILED"
                    print(e, file=sys.stderr)
            print(f"| {engine} | {backend} | {name} | {result} |", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
