"""Removes each hook and each collective in turn; prints the test that fails.

    KERAS_BACKEND=torch python integration_tests/removals.py
    KERAS_BACKEND=tensorflow python integration_tests/removals.py -k images
    KERAS_BACKEND=jax python integration_tests/removals.py
    python integration_tests/removals.py --rows keras_tp/testing
    python integration_tests/removals.py --processes 2 -k csv orbax

First the tests run once, and what each of them reaches is noted: rows of the
hook tables, and calls of our code that communicate. Then one thing after the
other is left out, and tests that reached it run until one fails. Handlers of
single operations that these tests do not notice are left out once more, for
the tests of every function and layer of Keras. Something whose absence no test
notices is a hole in the tests, and exit status 1.

Only what keras_tp does itself can be removed: the collectives that XLA, or
DTensor's expansion on TensorFlow, inserts into a program are not calls.
"""

import argparse
import collections
import contextlib
import functools
import inspect
import io
import itertools
import json
import os
import pathlib
import resource
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

# Backend -> files, and what of them runs; the quick tests of each kind.
TESTS = {
    "jax": (
        "keras_tp/testing",
        "keras_tp/distribution",
        "keras_tp/backend/jax",
        "integration_tests/bad_input_test.py",
        "integration_tests/saving_test.py",
        "integration_tests/residence_test.py",
        "integration_tests/rematerialization_test.py",
        "integration_tests/sequence_parallel_test.py",
        "integration_tests/training_test.py",
    ),
    "tensorflow": (
        "keras_tp/testing",
        "keras_tp/backend/tensorflow",
        "keras_tp/distribution",
        "integration_tests/bad_input_test.py",
        "integration_tests/collectives_test.py",
        "integration_tests/generate_test.py",
        "integration_tests/saving_test.py",
        "integration_tests/residence_test.py",
        "integration_tests/callbacks_test.py",
        "integration_tests/orbax_test.py",
        "integration_tests/rematerialization_test.py",
        "integration_tests/sequence_parallel_test.py",
        "integration_tests/training_test.py",
        "integration_tests/zero_test.py",
    ),
    "torch": (
        "keras_tp/testing",
        "keras_tp/backend/torch",
        "keras_tp/distribution",
        "integration_tests/torch_ops_test.py",
        "integration_tests/torch_data_test.py",
        "integration_tests/torch_models_test.py",
        "integration_tests/torch_shards_test.py",
        "integration_tests/torch_reading_test.py",
        "integration_tests/torch_losses_test.py",
        "integration_tests/torch_writing_test.py",
        "integration_tests/rematerialization_test.py",
        "integration_tests/sequence_parallel_test.py",
        "integration_tests/callbacks_test.py",
        "integration_tests/orbax_test.py",
        "integration_tests/zero_test.py",
        "integration_tests/generate_test.py",
        "integration_tests/collectives_test.py",
        "integration_tests/bad_input_test.py",
        "integration_tests/saving_test.py",
        "integration_tests/training_test.py",
    ),
}
# With `KERAS_TP_SLOW=1`, these try all functions and layers. They are run for
# removals that the tests above do not notice.
THOROUGH_TESTS = (
    "integration_tests/ops_test.py",
    "integration_tests/ops_layers_test.py",
)
# Set by the launcher in each process of a run: its index, and their number.
_INDEX = "RANK", "KERAS_DISTRIBUTION_PROCESS_ID"
_COUNT = "WORLD_SIZE", "KERAS_DISTRIBUTION_NUM_PROCESSES"
# Seconds that one process waits for the others at the end of a test.
PATIENCE = 120
# TensorFlow keeps all programs that it has compiled. A process that uses more
# bytes than this ends with this exit status, and a new one goes on. So does a
# run whose processes have lost their connection.
ENOUGH = 5 * 2**30
AGAIN = 75


class Switchboard:
    """Stands between what keras_tp does and Keras, as a plugin of pytest.

    Args:
        whole_rows: Boolean, whether a row of a hook table is left out as a
            whole. Defaults to `False`: each function that it replaces.

    Attributes:
        removed: String, what is left out now; `None` while noting.
        reached: Dict of what can be removed to the ids of the tests that
            reached it and passed.
        seconds: Dict of the ids of these tests to the time that each took.
        failed: String, id of the first test that failed in the last run, and
            `failure`, how it did; `None` if all passed.
    """

    def __init__(self, whole_rows=False):
        self.whole_rows = whole_rows
        self.removed = None
        self.reached = collections.defaultdict(list)
        self.seconds = {}
        self.failure = None
        self.failed = None
        self._now = set()

    def note(self, name):
        self._now.add(name)

    def pytest_runtest_setup(self, item):
        self._now.clear()

    def pytest_runtest_logreport(self, report):
        if report.when == "call" and report.passed:
            self.seconds[report.nodeid] = report.duration
            for name in self._now:
                self.reached[name].append(report.nodeid)
        if report.failed and self.failure is None:
            self.failed = report.nodeid
            crash = getattr(report.longrepr, "reprcrash", None)
            message = crash.message if crash else str(report.longrepr)
            self.failure = message.strip().splitlines()[0][:120]

    def noting(self, function, name):
        """Wraps a function so that a call of it is noted under a name."""

        @functools.wraps(function)
        def noted(*args, **kwargs):
            self.note(name)
            return function(*args, **kwargs)

        return noted

    def install(self, original):
        """Wraps `hooks.install`: rows are noted, or left out."""

        def row(hook, name):
            def replace(found):
                new = hook.replace(found)
                if not inspect.isfunction(new):
                    # A module or a value: who installs it has reached it.
                    self.note(name)
                    return new

                return self.noting(new, name)

            return hook._replace(replace=replace)

        def handlers(hook):
            """The row of all handlers, or rules: each of ours is a name."""

            def replace(found):
                new = dict(found)
                for operation, handler in hook.replace(found).items():
                    if handler is found.get(operation):
                        continue
                    name = f"handler {operation}"
                    if self.removed is None:
                        # It may be that no test reaches it.
                        self.reached[name]
                        handler = self.noting(handler, name)
                    if self.removed != name:
                        new[operation] = handler
                return new

            return hook._replace(replace=replace)

        def install(table):
            # A table may have several rows of one attribute.
            count = collections.Counter()
            rows = []
            parts = (lambda hook: [hook]) if self.whole_rows else _parts
            for hook in itertools.chain.from_iterable(map(parts, table)):
                one_by_one = ("_custom_op_handlers", "by_name")
                if not self.whole_rows and hook.attribute in one_by_one:
                    rows.append(handlers(hook))
                    continue
                first, *others = hook.attributes
                name = f"hook {hook.owner}.{first}"
                if others:
                    name += f" and {len(others)} more"
                count[name] += 1
                if count[name] > 1:
                    name += f" ({count[name]})"
                if self.removed is None:
                    # It may be that no test reaches it.
                    self.reached[name]
                    rows.append(row(hook, name))
                elif self.removed != name:
                    rows.append(hook)
            return original(rows)

        return install

    def communicate(self, original, without):
        """Wraps a function that communicates, at each of its callers.

        Args:
            original: Callable.
            without: Callable with the same arguments: the result, with each
                device keeping to itself. `NotImplemented` where nothing would
                be communicated.
        """

        @functools.wraps(original)
        def call(*args, **kwargs):
            name = f"collective in {_caller()}"
            if self.removed is None or self.removed == name:
                alone = without(*args, **kwargs)
                if alone is not NotImplemented:
                    if self.removed == name:
                        return alone
                    self.note(name)
            return original(*args, **kwargs)

        return call


def _parts(hook):
    """Returns rows that can be removed: one for each function that replaces."""
    if hook.replace.__qualname__.startswith("around."):
        return [hook]
    return [hook._replace(attribute=name) for name in hook.attributes]


def _caller():
    """Returns the function of keras_tp that is being run."""
    frame = inspect.currentframe()
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module.startswith("keras_tp.backend."):
            return f"{module}.{frame.f_code.co_name}"
        frame = frame.f_back
    return "the gradient, or an operation of DTensor"


def _variable(names, default):
    """Returns the value of the first of some environment variables."""
    return next((os.environ[n] for n in names if n in os.environ), default)


def is_alone():
    """Returns whether this process is not one of a run of several."""
    return _variable(_INDEX, None) is None


def backend_name():
    """Returns the name of the backend, which may run under one of Keras's."""
    chosen = os.environ.get("KERAS_TP_BACKEND")
    return chosen or os.environ.setdefault("KERAS_BACKEND", "jax")


def watch(board, backend):
    """Puts the switchboard in place.

    Args:
        board: `Switchboard`.
        backend: String, its name.
    """
    from keras_tp.backend import hooks

    hooks.install = board.install(hooks.install)
    if backend == "torch":
        import torch
        from torch.distributed.tensor import _dispatch
        from torch.distributed.tensor import _redistribute

        def without(local, current, target, **kwargs):
            changed = False
            for dim, (a, b) in enumerate(
                zip(current.placements, target.placements)
            ):
                if a == b or a.is_replicate():
                    continue
                if a.is_shard() and b.is_replicate():
                    size = current.mesh.size(dim)
                    local = torch.cat([local] * size, a.dim)
                elif not (a.is_partial() and b.is_replicate()):
                    return NotImplemented
                changed = True
            return local if changed else NotImplemented

        for module in (_dispatch, _redistribute):
            module.redistribute_local_tensor = board.communicate(
                module.redistribute_local_tensor, without
            )
    elif backend == "tensorflow":
        from tensorflow.experimental import dtensor

        dtensor.relayout = board.communicate(
            dtensor.relayout, lambda tensor, layout, name=None: tensor
        )


def run_pytest(board, arguments):
    """Runs pytest in this process; returns whether all tests passed."""
    import pytest

    board.failure = board.failed = None
    options = ["-q", "--tb=short", "-p", "no:cacheprovider"]
    if not is_alone():
        options += ["-p", "integration_tests.torch_ranks"]
        ranks = pathlib.Path(os.environ["KERAS_TP_RANK_FOLDER"])
        ranks.mkdir(exist_ok=True)
    with contextlib.redirect_stdout(io.StringIO()):
        code = pytest.main([*options, *arguments], plugins=[board])
    return code == 0


def agreed(folder, step, outcome):
    """Tells the other processes of a run how a test ended here.

    Returns:
        List of strings, how it ended in each process: how it failed there, or
        empty where it passed.
    """
    count = int(_variable(_COUNT, "1"))
    index = _variable(_INDEX, "0")
    mine = folder / f"step_{step}_{index}"
    mine.with_suffix(".part").write_text(outcome)
    mine.with_suffix(".part").rename(mine)
    until = time.monotonic() + PATIENCE
    paths = [folder / f"step_{step}_{i}" for i in range(count)]
    while not all(path.exists() for path in paths):
        if time.monotonic() > until:
            sys.exit("the processes of the run fell out of step")
        time.sleep(0.02)
    return [path.read_text() for path in paths]


def says_most(outcomes):
    """Returns the failure to report; empty if the test passed everywhere."""
    # How the test failed says more than a connection that broke after it.
    return min(filter(None, outcomes), key=is_broken, default="")


def are_in_step(outcomes):
    """Returns whether processes can run another test after this one.

    If one failed in a test and another did not, or elsewhere, then one may
    have waited for the other until their connection was closed. Every later
    test that communicates would fail, whatever is left out.
    """
    return len(set(outcomes)) == 1 and not any(map(is_broken, outcomes))


def is_broken(outcome):
    """Returns whether a connection between processes broke in a test."""
    signs = "gloo", "Connection closed", "pair closure"
    return any(sign in outcome for sign in signs)


def candidates(reached, seconds):
    """Returns a dict of what can be removed to the tests to try.

    First those that are quick and reach little else.
    """
    breadth = collections.Counter(
        test for tests in reached.values() for test in tests
    )
    return {
        name: sorted(set(tests), key=lambda t: (breadth[t] * seconds[t], t))
        for name, tests in reached.items()
    }


def child(options):
    """Notes, then removes what is not in the folder's results yet."""
    backend = backend_name()
    folder = pathlib.Path(options.folder)
    first = _variable(_INDEX, "0") == "0"
    board = Switchboard(options.rows)
    watch(board, backend)
    notes = folder / "reached.json"
    if not notes.exists():
        run_pytest(board, options.tests)
        if not any(board.reached.values()):
            sys.exit("No test passed.")
        agreed(folder, "notes", "")
        noted = {"reached": board.reached, "seconds": board.seconds}
        if first:
            notes.with_suffix(".part").write_text(json.dumps(noted))
            notes.with_suffix(".part").rename(notes)
        agreed(folder, "noted", "")
    tests = candidates(**json.loads(notes.read_text()))
    results = folder / "results.jsonl"
    done = [
        json.loads(line)["name"] for line in results.read_text().splitlines()
    ]
    agreed(folder, f"start_{len(done)}", "")
    # Several processes have to leave each test in step.
    together = 20 if is_alone() else 1
    only = folder / "only.json"
    chosen = json.loads(only.read_text()) if only.exists() else tests
    for name in sorted(set(tests) & set(chosen)):
        if name in done or not any(part in name for part in options.k):
            continue
        board.removed = name
        found = {"name": name, "test": "", "error": ""}
        outcomes = [""]
        if first:
            # What stands here if the run ends with it.
            (folder / "now").write_text(json.dumps({**found, "test": "?"}))
        for index, start in enumerate(range(0, len(tests[name]), together)):
            tried = tests[name][start : start + together]
            step = f"{len(done)}_{index}"
            # A test may have written files before.
            os.environ["KERAS_TP_RANK_FOLDER"] = str(folder / f"ranks_{step}")
            passed = run_pytest(board, ["-x", *tried])
            outcome = "" if passed else str(board.failure or "failed")
            outcomes = agreed(folder, step, outcome)
            if any(outcomes):
                test = board.failed or tried[0]
                found.update(test=test, error=says_most(outcomes))
                break
        done.append(name)
        if first:
            with results.open("a") as file:
                print(json.dumps(found), file=file)
        agreed(folder, f"end_{len(done)}", "")
        if not are_in_step(outcomes):
            sys.exit(AGAIN)
        used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        if used > ENOUGH and is_alone():
            sys.exit(AGAIN)


def parent(options):
    """Removes everything once, and prints a table."""
    tests = options.tests or TESTS.get(backend_name(), ["keras_tp/testing"])
    found = run_all(options, tests)
    left = [name for name, result in found.items() if not result["test"]]
    if left and not options.tests:
        again = run_all(options, THOROUGH_TESTS, left, KERAS_TP_SLOW="1")
        found.update((k, v) for k, v in again.items() if v["test"])
    return report(found.values())


def run_all(options, tests, only=None, **env):
    """Starts runs until everything was removed once.

    Args:
        options: The options of the command line.
        tests: Sequence of strings, the files.
        only: List of strings, the names to remove. Defaults to `None`, for
            all names.
        env: Further variables of the environment.

    Returns:
        Dict of each name to its result.
    """
    with tempfile.TemporaryDirectory(prefix="keras_tp_removals_") as folder:
        return _run_all(options, tests, only, env, pathlib.Path(folder))


def _run_all(options, tests, only, env, folder):
    (folder / "results.jsonl").touch()
    if only is not None:
        (folder / "only.json").write_text(json.dumps(only))
    command = [sys.executable]
    if backend_name() == "torch" or options.processes > 1:
        command += ["-m", "keras_tp.launch", "--devices", str(options.devices)]
    if options.processes > 1:
        command += ["--processes", str(options.processes)]
    command += [__file__, "--folder", str(folder), *tests, "-k", *options.k]
    if options.rows:
        command.append("--rows")
    env = {
        **os.environ,
        **env,
        "PYTHONPATH": str(ROOT),
        "KERAS_TP_RANK_FOLDER": str(folder / "ranks"),
    }
    while True:
        before = (folder / "results.jsonl").read_text()
        for path in folder.glob("step_*"):
            path.unlink()
        ended = subprocess.run(
            command, env=env, cwd=ROOT, capture_output=True, text=True
        )
        if ended.returncode == 0:
            break
        if ended.returncode == AGAIN:
            continue
        now = folder / "now"
        if not now.exists():
            sys.exit(ended.stdout[-3000:] + ended.stderr[-3000:])
        found = json.loads(now.read_text())
        found["error"] = "ends, or stops, the whole run"
        done = [json.loads(line)["name"] for line in before.splitlines()]
        if found["name"] not in done:
            with (folder / "results.jsonl").open("a") as file:
                print(json.dumps(found), file=file)
        now.unlink()
    lines = (folder / "results.jsonl").read_text().splitlines()
    results = [json.loads(line) for line in lines]
    return {result["name"]: result for result in results}


def report(results):
    """Prints a table of Markdown; returns how many removals went unnoticed."""
    print("| removed | first test that fails | how |\n|---|---|---|")
    for found in sorted(results, key=lambda found: found["name"]):
        test = found["test"] or "**none**"
        error = found["error"].replace("|", "\\|")
        print(f"| {found['name']} | {test} | {error} |")
    return sum(not found["test"] for found in results)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("tests", nargs="*", help="files, in place of the backend's own")
    add("-k", nargs="+", default=[""], help="only names that have one of these")
    add("--rows", action="store_true", help="rows of the table as a whole")
    add("--devices", type=int, default=2, help="of a run in processes")
    add("--processes", type=int, default=1, help="on torch one per device")
    add("--folder", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.folder:
        child(options)
    else:
        sys.exit(1 if parent(options) else 0)


if __name__ == "__main__":
    main()
