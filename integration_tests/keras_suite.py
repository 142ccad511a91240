"""Runs the tests that Keras ships, with a distribution active around each.

    python integration_tests/keras_suite.py --backend jax --distribution tensor
    python integration_tests/keras_suite.py --backend jax --table

Keras's wheel has its own test files, below `keras/src`. Each test that passes
without a distribution (`--distribution none`) has to pass under

- `data`: `DataParallel`,
- `map`: `ModelParallel`, every weight split along its largest dim that divides,
- `tensor`: `TensorParallel`,

or stand in `keras_suite_listed.py`, with a reason. Results are appended to
`build/keras_suite/<backend>_<distribution>_<devices>.jsonl`, a line for each
test; a file that is in there is not run again, unless `--fresh` is given, and
`--failed` runs the tests again that failed. Of the tests that do not pass, it
is found out by a run without a distribution whether they should. A process
runs `--batch` files. Where it crashes, or a test takes longer than `--limit`
seconds, that test is recorded as crashed, and the next process goes on after
it. On torch, every process of a run is given the same tests.
"""

import argparse
import collections
import fnmatch
import importlib.util
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from rich.console import Console
from rich.table import Table

from integration_tests import keras_suite_listed
from integration_tests import launching

BACKENDS = ("jax", "tensorflow", "torch")
DISTRIBUTIONS = ("none", "data", "map", "tensor")
# Where the tables that are part of the repository stand.
TABLES = ROOT / "benchmarks"


class Run(
    collections.namedtuple("Run", ["backend", "distribution", "devices"])
):
    """Which results belong together.

    Args:
        backend: String, one of `BACKENDS`.
        distribution: String, one of `DISTRIBUTIONS`.
        devices: Int.
    """

    def path(self, folder):
        """Returns the file that has the results."""
        name = f"{self.backend}_{self.distribution}_{self.devices}.jsonl"
        return pathlib.Path(folder, name)


class Counts(
    collections.namedtuple("Counts", ["passed", "listed", "failed", "skipped"])
):
    """Numbers of tests; those that fail without a distribution are skipped."""

    def __str__(self):
        return " / ".join(map(str, self))


def source_folder():
    """Returns Keras's folder of sources; does not import Keras."""
    found = importlib.util.find_spec("keras")
    return pathlib.Path(found.submodule_search_locations[0], "src")


def select_files(patterns):
    """Returns the names of test files, relative to `keras/src`.

    Args:
        patterns: List of strings: parts of names, or patterns of `fnmatch`.
            The files come in their order. If it is empty, all are meant.
    """
    folder = source_folder()
    names = sorted(
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*_test.py")
    )
    found = [
        name
        for pattern in patterns or [""]
        for name in names
        if pattern in name or fnmatch.fnmatch(name, pattern)
    ]
    return list(dict.fromkeys(found))


def read_rows(path):
    """Returns the rows of a results file; of one test, the last."""
    if not pathlib.Path(path).exists():
        return []
    rows = {}
    for line in pathlib.Path(path).read_text().splitlines():
        row = json.loads(line)
        rows[row.get("test"), row.get("done")] = row
    return list(rows.values())


def results_of(run, folder):
    """Returns a dict of test id to row."""
    return {
        row["test"]: row for row in read_rows(run.path(folder)) if "test" in row
    }


def done_files(run, folder):
    """Returns the names of the files that were run to their end."""
    rows = read_rows(run.path(folder))
    return {row["done"] for row in rows if "done" in row}


def run_files(
    run,
    files,
    folder,
    limit=240,
    batch=12,
    output=None,
    source=None,
    only=None,
):
    """Runs what is left of some files and appends what came of it.

    Args:
        run: `Run`.
        files: List of names, as `select_files` returns them.
        folder: Path of the folder with the results.
        limit: Int, seconds that a test may take.
        batch: Int, number of files that one process runs.
        output: Open file that the output of pytest goes to. Defaults to none.
        source: Path of the folder that the names refer to. Defaults to
            `keras/src`.
        only: List of ids of tests. Defaults to all tests of the files.

    Yields:
        `(names, seconds)` of each batch, after it ended.
    """
    pathlib.Path(folder).mkdir(parents=True, exist_ok=True)
    if only is None:
        done = done_files(run, folder)
    else:
        done = set(files) - {test.split("::")[0] for test in only}
    left = [name for name in files if name not in done]
    for begin in range(0, len(left), max(batch, 1)):
        names = left[begin : begin + batch]
        started = time.monotonic()
        while not _run_batch(
            run, names, folder, limit, output, source or source_folder(), only
        ):
            pass
        if only is None:
            _append(run, folder, [{"done": name} for name in names])
        yield names, time.monotonic() - started


def take_over(run, files, folder):
    """Copies the results of tests that do not depend on the distribution.

    A test that asks nothing of the distribution gives the same result under
    each. Most of these tests make no variable.

    Args:
        run: `Run` that the results are for.
        files: List of names of files.
        folder: Path of the folder with the results.
    """
    for name in DISTRIBUTIONS[1:]:
        other = run._replace(distribution=name)
        ended = done_files(other, folder) - done_files(run, folder)
        known = results_of(run, folder)
        tests_of = collections.defaultdict(list)
        for test, row in results_of(other, folder).items():
            tests_of[test.split("::")[0]].append(row)
        for file in ended.intersection(files):
            alike = [
                {**row, "run_under": name}
                for row in tests_of[file]
                if row["outcome"] in ("passed", "skipped")
                and not row.get("asked", True)
            ]
            new = [row for row in alike if row["test"] not in known]
            if len(alike) == len(tests_of[file]):
                new.append({"done": file})
            _append(run, folder, new)


def forget(run, folder, files=(), tests=()):
    """Removes the results of some files, and of some tests."""
    path = run.path(folder)
    kept = [
        row
        for row in read_rows(path)
        if row.get("done", row.get("test", "").split("::")[0]) not in files
        and row.get("test") not in tests
    ]
    if path.exists():
        path.write_text("".join(json.dumps(row) + "\n" for row in kept))


def _append(run, folder, rows):
    with open(run.path(folder), "a") as file:
        file.write("".join(json.dumps(row) + "\n" for row in rows))


def _run_batch(run, files, folder, limit, output, source, only):
    """Runs files in one process; on torch, in one for each device.

    Returns:
        Whether they ran to the end. If not, one more test has a row, and what
        is left is to be run again.
    """
    scratch = pathlib.Path(tempfile.mkdtemp(prefix="keras_suite_"))
    done = [
        test for test in results_of(run, folder) if test.split("::")[0] in files
    ]
    count = 1
    command = [sys.executable]
    if run.backend == "torch" and run.distribution != "none":
        count = run.devices
        command += ["-m", "keras_tp.launch", "--devices", str(run.devices)]
    command.append(str(ROOT / "integration_tests" / "keras_suite_worker.py"))
    environment = _environment(run)
    # In a file: the ids of many tests are too long for a variable.
    settings = scratch / "settings.json"
    environment["KERAS_TP_SUITE"] = str(settings)
    settings.write_text(
        json.dumps(
            {
                "distribution": run.distribution,
                "devices": run.devices,
                "source": str(source),
                "scratch": str(scratch),
                "done": done,
                "only": only,
                "limit": limit,
            }
        )
    )
    process = subprocess.Popen(
        [*command, *(str(source / name) for name in files)],
        cwd=scratch,
        env=environment,
        stdout=output or subprocess.DEVNULL,
        stderr=subprocess.STDOUT,
        # So that all of its processes can be ended.
        start_new_session=True,
    )
    why = "was interrupted"
    try:
        why = _wait(process, scratch, count, limit)
    finally:
        _end(process)
        rows = joined_rows(
            [read_rows(scratch / f"rows.{rank}") for rank in range(count)]
        )
        if why and why != "was interrupted":
            ended = {row["test"] for row in rows}
            rows += [
                {"test": test, "outcome": "crashed", "error": f"It {why}."}
                for test in _running(scratch, count) - ended
            ]
        _append(run, folder, rows)
        shutil.rmtree(scratch, ignore_errors=True)
    if why and not rows:
        raise RuntimeError(
            f"A process that was to run {files} {why}, and no test began."
        )
    return not why


def joined_rows(rows_of_each):
    """Returns one list of rows of those of each process.

    A test has to end in all of them, in the same way.
    """
    by_test = [{row["test"]: row for row in rows} for rows in rows_of_each]
    joined = []
    for test in dict.fromkeys(test for rows in by_test for test in rows):
        rows = [rows.get(test) for rows in by_test]
        if None in rows:
            row = {"test": test, "outcome": "crashed"}
            row["error"] = f"It did not end in process {rows.index(None)}."
            joined.append(row)
            continue
        outcomes = [row["outcome"] for row in rows]
        worst = next(
            row
            for outcome in ("failed", "skipped", "passed")
            for row in rows
            if row["outcome"] == outcome
        )
        if len(set(outcomes)) > 1:
            error = f"Outcomes {outcomes}. {worst['error']}"
            worst = {**worst, "outcome": "failed", "error": error}
        asked = any(row.get("asked", True) for row in rows)
        joined.append({**worst, "asked": asked})
    return joined


def _running(scratch, count):
    """Returns the tests that processes were in."""
    paths = [scratch / f"running.{rank}" for rank in range(count)]
    return {path.read_text() for path in paths if path.exists()} - {""}


def _wait(process, scratch, count, limit):
    """Waits for a process; returns why it did not end well, or `None`."""
    paths = [scratch / f"running.{rank}" for rank in range(count)]
    while process.poll() is None:
        time.sleep(0.2)
        changed = [path.stat().st_mtime for path in paths if path.exists()]
        # Of several, one that has ended a test waits for the others first.
        patience = limit if count == 1 else limit + 30
        if changed and time.time() - max(changed) > patience:
            return f"took longer than {limit} s"
    if process.returncode == 0:
        return None
    return f"ended its process, with exit code {process.returncode}"


def _end(process):
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()


def _environment(run):
    given = launching.environment(
        devices=run.devices,
        KERAS_BACKEND=run.backend,
        PYTHONHASHSEED="0",
        PYTHONPATH=os.pathsep.join(
            filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])
        ),
        TF_CPP_MIN_LOG_LEVEL="3",
    )
    given.pop("PYTHONUNBUFFERED", None)
    if run.backend == "jax":
        given["XLA_FLAGS"] += (
            " --xla_cpu_collective_call_terminate_timeout_seconds=600"
        )
        given["JAX_PLATFORMS"] = "cpu"
    elif run.backend == "torch" and run.distribution != "none":
        given["OMP_NUM_THREADS"] = "1"
    return given


def compare(backend, distribution, devices, folder):
    """Compares the results of a distribution with those of none.

    Returns:
        Dict of file name to a dict of test id to `"passed"`, `"listed"`,
        `"failed"` or `"skipped"`.
    """
    plain = results_of(Run(backend, "none", devices), folder)
    rows = results_of(Run(backend, distribution, devices), folder)
    found = collections.defaultdict(dict)
    for test, row in rows.items():
        outcome = row["outcome"]
        if test in plain and plain[test]["outcome"] != "passed":
            outcome = "skipped"
        elif outcome != "passed":
            reason = keras_suite_listed.reason_for(test, backend, distribution)
            outcome = "listed" if reason else "failed"
        found[test.split("::")[0]][test] = outcome
    return found


def unexplained(run, folder):
    """Returns the tests that did not pass, and were not run without a
    distribution."""
    plain = results_of(Run(run.backend, "none", run.devices), folder)
    return [
        test
        for test, row in results_of(run, folder).items()
        if row["outcome"] != "passed" and test not in plain
    ]


def counts_of(outcomes):
    """Returns the `Counts` of a list of outcomes."""
    counter = collections.Counter(outcomes)
    return Counts(*(counter[name] for name in Counts._fields))


def table_of(backend, devices, folder):
    """Returns the rows of the table: a name, and a cell per distribution."""
    found = {
        name: compare(backend, name, devices, folder)
        for name in DISTRIBUTIONS[1:]
    }
    files = sorted({name for results in found.values() for name in results})
    rows = [
        [
            name,
            *(
                str(counts_of(results[name].values()))
                if name in results
                else ""
                for results in found.values()
            ),
        ]
        for name in files
    ]
    totals = [
        counts_of(o for outcomes in results.values() for o in outcomes.values())
        for results in found.values()
    ]
    return [*rows, ["all", *map(str, totals)]]


def failures_of(backend, devices, folder):
    """Yields `(distribution, test, error)` of all that failed."""
    for name in DISTRIBUTIONS[1:]:
        rows = results_of(Run(backend, name, devices), folder)
        for outcomes in compare(backend, name, devices, folder).values():
            for test, outcome in outcomes.items():
                if outcome == "failed":
                    yield name, test, rows[test]["error"]


def show_table(backend, devices, folder):
    """Prints the table, and what failed."""
    table = Table(title=f"{backend}, {devices} devices: {COLUMNS}")
    table.add_column("file", overflow="fold")
    for name in DISTRIBUTIONS[1:]:
        table.add_column(name, justify="right", no_wrap=True)
    for row in table_of(backend, devices, folder):
        table.add_row(*row)
    console = Console()
    console.print(table)
    for name, test, error in failures_of(backend, devices, folder):
        first = error.partition("\n")[0]
        console.print(f"{name} {test}: {first}", markup=False, soft_wrap=True)


def write_table(backend, devices, folder):
    """Writes the table that is part of the repository.

    What was not run now stays as it was written before.
    """
    path = TABLES / f"keras_suite_{backend}.md"
    names = DISTRIBUTIONS[1:]
    cells = _written_cells(path)
    for name, *found in table_of(backend, devices, folder)[:-1]:
        for distribution, cell in zip(names, found):
            if cell:
                cells[name, distribution] = cell
    totals = [
        Counts(*map(sum, zip(*(_counts(cell) for cell in column))))
        if column
        else ""
        for column in (
            [cell for (_, of), cell in cells.items() if of == name]
            for name in names
        )
    ]
    lines = [
        f"# Keras's own tests under a distribution: {backend}",
        "",
        f"Written by `python integration_tests/keras_suite.py --backend "
        f"{backend} --write`, on {devices} devices.",
        f"Numbers of tests: {COLUMNS}. Of {len(select_files([]))} files, those "
        "that are not here, or have no numbers, were not run yet. A test that "
        "asks nothing of the distribution (it makes no variable) runs under "
        "one of the three, and counts for each.",
        "",
        f"| file | {' | '.join(names)} |",
        "|---|" + "---:|" * len(names),
        *(
            " | ".join(
                [f"| {name}", *(cells.get((name, of), "") for of in names)]
            )
            + " |"
            for name in sorted({name for name, _ in cells})
        ),
        f"| {_TOTALS} | {' | '.join(map(str, totals))} |",
        "",
        "| tests listed | under | why |",
        "|---|---|---|",
        *(
            f"| `{row.pattern}` | {', '.join(row.distributions)} | "
            f"{row.reason} |"
            for row in keras_suite_listed.LISTED
            if backend in row.backends
        ),
    ]
    path.write_text("\n".join(lines) + "\n")
    return path


_TOTALS = "all"


def _written_cells(path):
    """Returns a dict of file and distribution to what a table says of them."""
    cells = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        name, *found = (cell.strip() for cell in line.strip("|").split("|"))
        for distribution, cell in zip(DISTRIBUTIONS[1:], found):
            if name.endswith(".py") and cell:
                cells[name, distribution] = cell
    return cells


def _counts(cell):
    return map(int, cell.split(" / "))


def _run_and_tell(run, files, options, only):
    """Runs files, or some of their tests, and prints a line for each batch."""
    with open(options.output or os.devnull, "a") as output:
        for names, seconds in run_files(
            run,
            files,
            options.results,
            options.limit,
            options.batch,
            output,
            only=only,
        ):
            counter = collections.Counter(
                row["outcome"]
                for test, row in results_of(run, options.results).items()
                if test.split("::")[0] in names
            )
            Console().print(
                f"{run.distribution}: {names[0]} ... {names[-1]}, "
                f"{seconds:.0f} s: {dict(counter)}",
                soft_wrap=True,
                highlight=False,
            )


COLUMNS = "passed / listed / failed / skipped"


def main(argv=None):
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0],
        epilog="Shards of Keras's tests: see the docstring of this file.",
    )
    add = parser.add_argument
    add("--backend", choices=BACKENDS, default="jax")
    add("--distribution", choices=DISTRIBUTIONS, action="append", default=[])
    add("--devices", type=int, default=2)
    add(
        "--select",
        nargs="+",
        default=[],
        metavar="PATTERN",
        help="part of a file's name, or a pattern with *; by default all",
    )
    add("--results", default=str(ROOT / "build" / "keras_suite"))
    add("--fresh", action="store_true", help="run again what was run")
    add("--failed", action="store_true", help="run again what failed")
    add("--batch", type=int, default=12, help="files of one process")
    add("--limit", type=int, default=240, help="seconds that a test may take")
    add(
        "--packages",
        help="folder with packages that some of Keras's tests import; see "
        "keras_suite_requirements.txt",
    )
    add("--output", help="file that pytest's output is appended to")
    add("--table", action="store_true", help="print the table")
    add("--write", action="store_true", help="write the table to benchmarks/")
    options = parser.parse_args(argv)
    sys.stdout.reconfigure(line_buffering=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    if options.packages:
        os.environ["PYTHONPATH"] = str(pathlib.Path(options.packages).resolve())
    files = select_files(options.select)
    console = Console()
    for name in options.distribution:
        run = Run(options.backend, name, options.devices)
        only = None
        if options.failed:
            only = [
                test
                for of, test, _ in failures_of(
                    options.backend, options.devices, options.results
                )
                if of == name and test.split("::")[0] in files
            ]
            forget(run, options.results, tests=only)
        elif options.fresh:
            forget(run, options.results, files)
        elif name != "none":
            take_over(run, files, options.results)
        _run_and_tell(run, files, options, only)
        if name != "none":
            plain = run._replace(distribution="none")
            suspect = unexplained(run, options.results)
            names = sorted({test.split("::")[0] for test in suspect})
            _run_and_tell(plain, names, options, suspect)
    if options.table or options.distribution:
        show_table(options.backend, options.devices, options.results)
    if options.write:
        console.print(
            str(write_table(options.backend, options.devices, options.results))
        )
    failed = list(
        failures_of(options.backend, options.devices, options.results)
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
