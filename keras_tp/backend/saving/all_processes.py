"""Runs a function that reads or writes files in every process."""

import os

from keras_tp.backend import current
from keras_tp.backend.saving import digests


def run(function, what):
    """Runs a function in every process; an error in one is an error in all.

    A collective.

    Args:
        function: Function without arguments. It returns a small value.
        what: String, what the function does, as in `"write a file"`.

    Returns:
        List of what the functions returned.
    """
    processes = current.load("processes")
    result, error = None, None
    try:
        result = function()
    except digests.READING_ERRORS as e:
        error = e
    message = error and f"{type(error).__name__}: {error}"
    answers = processes.gather([message, result], f"To {what}")
    if error is not None:
        raise error
    for index, (message, _) in enumerate(answers):
        if message:
            raise OSError(f"Process {index} could not {what}: {message}")
    return [result for _, result in answers]


def share_of(path):
    """Returns which part of a file's values this process compares.

    A collective. If all processes read one file, they divide the work. A
    process that has a copy of its own, on another machine, compares all that it
    reads.

    Returns:
        Pair: the index of this process, and the number of processes that divide
        the values among them.
    """
    lib = current.load("distribution_lib")
    index, count = lib.process_id(), lib.num_processes()
    if count == 1:
        return 0, 1
    processes = current.load("processes")
    found = processes.gather(_identity_of(path), "To find out who reads a file")
    is_one = found[0] is not None and found.count(found[0]) == count
    return (index, count) if is_one else (0, 1)


def _identity_of(path):
    """Returns what a file, also of a network file system, has for itself."""
    if not isinstance(path, (str, os.PathLike)):
        return None
    try:
        held = os.stat(path)
    except OSError:
        return None
    return f"{held.st_ino} {held.st_size} {held.st_mtime_ns}"
