"""The launcher's report of the processes that failed, the first one last."""

import collections
import json
import os
import signal
import sys

from keras_tp.backend.processes import error_propagation

# Lines of output to show of a process that ended without a Python error.
_LAST_LINES = 20


# Exit codes of processes that crashed or were killed.
_KILLED = [
    128 + n
    for n in (signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV, signal.SIGBUS)
]


class Failure(collections.namedtuple("Failure", "at index text summary code")):
    """How a process failed.

    Args:
        at: Float. Time of the failure, in seconds since the epoch.
        index: Int. Index of the process.
        text: String. The error, with the traceback if it has one.
        summary: String. The error without the traceback.
        code: Int. Exit code of the process, as a shell reports it.
    """


def told(path, index, code):
    """Returns the `Failure` that a process wrote, or `None` if it wrote none.

    Args:
        path: String. Value of `error_propagation.ERROR_FILE` in the process.
        index: Int. Index of the process.
        code: Int. Exit code of the process, as a shell reports it.
    """
    if not os.path.exists(path):
        return None
    with open(path) as file:
        entries = [json.loads(line) for line in file]
    return Failure(
        at=entries[0]["at"],
        index=index,
        text="".join(entry["text"] for entry in entries),
        summary=entries[0]["summary"],
        # A process killed while it wrote has the exit code of a signal.
        code=code if 0 < code < 128 else 1,
    )


def noted_end(path):
    """Returns the time when a process began to end, or `None` if not noted."""
    if not os.path.exists(path + error_propagation.END):
        return None
    with open(path + error_propagation.END) as file:
        return float(file.read())


def untold(at, index, return_code, output_path=None):
    """Returns the `Failure` of a process that ended without a Python error.

    Args:
        at: Float. Time when it ended, in seconds since the epoch.
        index: Int. Index of the process.
        return_code: Int. Negative for a signal, as in `subprocess.Popen`.
        output_path: String. File with its output. `None` if it was printed.
    """
    how = f"It ended with exit code {return_code}.\n"
    if return_code < 0:
        name = signal.Signals(-return_code).name
        how = f"It was ended by {name}.\n"
    return Failure(
        at=at,
        index=index,
        text=how + _last_lines(output_path),
        summary=how,
        code=exit_code(return_code),
    )


def exit_code(return_code):
    """Returns the exit code of a process as a shell reports it."""
    return 128 - return_code if return_code < 0 else return_code


def report(failures, count, everything=False):
    """Writes the errors of processes to stderr, the first error last.

    Args:
        failures: List of `Failure`.
        count: Int. Number of processes of the whole run.
        everything: Boolean. Whether to write later errors with their
            tracebacks, too. Defaults to `False`: without tracebacks, and once
            for all processes that have the same error.

    Returns:
        Int. The exit code of the process that failed first, 0 without failures.
    """
    if not failures:
        return 0
    first, *others = sorted(failures, key=_order)
    later = {}
    for failure in others:
        text = failure.text if everything else failure.summary
        if everything or failure.summary != first.summary:
            later.setdefault(text, []).append(failure.index)
    for text, indices in reversed(later.items()):
        _write(f"Then, {_processes(indices, count)}:\n{text}")
    indices = [first.index]
    if not everything:
        indices += [
            failure.index
            for failure in others
            if failure.summary == first.summary
        ]
    _write(f"First error, {_processes(indices, count)}:\n{first.text}")
    sys.stderr.flush()
    return next((f.code for f in [first, *others] if f.code), 0)


def _order(failure):
    """Sorts failures by time, with killed processes before all others.

    A killed process reports nothing, and on a busy machine the launcher may
    notice its end after the failures of processes that waited for it. The kill
    is the cause: processes do not kill each other, and those that the launcher
    ends are not failures.
    """
    return failure.code not in _KILLED, failure.at


def _processes(indices, count):
    numbers = ", ".join(map(str, sorted(indices)))
    return f"process{'es' if len(indices) > 1 else ''} {numbers} of {count}"


def _write(text):
    sys.stderr.write(f"[keras_tp.launch] {text}")


def _last_lines(path):
    """Returns the last output of a process, which was not printed."""
    if path is None or not os.path.exists(path):
        return ""
    with open(path, errors="replace") as file:
        lines = collections.deque(file, _LAST_LINES)
    if not lines:
        return ""
    return "Its last output:\n" + "".join(lines).rstrip("\n") + "\n"
