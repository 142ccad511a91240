"""What a launcher says about the processes that failed: the first one last."""

import collections
import json
import os
import signal
import sys

from keras_tp.backend.processes import error_propagation

# Of the output of a process that ended without a Python error.
_LAST_LINES = 20


# Exit codes of processes that were ended from outside, or crashed.
_KILLED = [
    128 + n
    for n in (signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV, signal.SIGBUS)
]


class Failure(
    collections.namedtuple(
        "Failure", ["at", "index", "text", "summary", "code"]
    )
):
    """How a process failed.

    Args:
        at: Float, when, in seconds since the epoch.
        index: Int, index of the process.
        text: String, its error, with the traceback if there is one.
        summary: String, the error without the traceback.
        code: Int, its exit code, as a shell has it.
    """


def told(path, index, code):
    """Returns the `Failure` that a process wrote; `None` if it did not.

    Args:
        path: String, what `ending.ERROR_FILE` was for that process.
        index: Int, index of the process.
        code: Int, its exit code, as a shell has it.
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
        # One that was ended while it reported has the code of a signal.
        code=code if 0 < code < 128 else 1,
    )


def noted_end(path):
    """Returns when a process noted that it ends; `None` if it did not.

    Args:
        path: String, what `ending.ERROR_FILE` was for that process.
    """
    if not os.path.exists(path + error_propagation.END):
        return None
    with open(path + error_propagation.END) as file:
        return float(file.read())


def untold(at, index, return_code, output_path=None):
    """Returns the `Failure` of a process that ended without a Python error.

    Args:
        at: Float, when it ended, in seconds since the epoch.
        index: Int, index of the process.
        return_code: Int, as `subprocess.Popen` has it: negative for a signal.
        output_path: String, the file with its output. Defaults to `None`:
            the output was printed.
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
    """Returns the exit code of a process as a shell has it."""
    return 128 - return_code if return_code < 0 else return_code


def report(failures, count, everything=False):
    """Writes how processes failed: the first error last.

    Args:
        failures: List of `Failure`.
        count: Int, number of processes of the whole run.
        everything: Boolean, whether to write what came after the first error
            with its traceback, too. Defaults to `False`: the error alone, and
            once for all processes that have the same one.

    Returns:
        Int, the exit code of the process that failed first; 0 if none did.
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
    """Sorts failures by time, and processes that were killed before others.

    Such a process told nobody, and on a busy machine the launcher sees its end
    later than the processes that were waiting for it. None of them kills
    another, and those that the launcher ended are no failures.
    """
    return failure.code not in _KILLED, failure.at


def _processes(indices, count):
    numbers = ", ".join(map(str, sorted(indices)))
    return f"process{'es' if len(indices) > 1 else ''} {numbers} of {count}"


def _write(text):
    sys.stderr.write(f"[keras_tp.launch] {text}")


def _last_lines(path):
    """Returns what a process wrote last, for whoever did not see it."""
    if path is None or not os.path.exists(path):
        return ""
    with open(path, errors="replace") as file:
        lines = collections.deque(file, _LAST_LINES)
    if not lines:
        return ""
    return "Its last output:\n" + "".join(lines).rstrip("\n") + "\n"
