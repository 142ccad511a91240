"""How long a process waits for the others."""

import contextlib
import math
import os

# How long the others wait for one of them that writes a file, in seconds.
LONGEST_S = 3600
_longer = []


def timeout():
    """Returns the seconds that a process waits for the others of its run.

    The environment variable KERAS_TP_TIMEOUT, by default 45.
    """
    given = os.environ.get("KERAS_TP_TIMEOUT", "45")
    try:
        seconds = float(given)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < math.inf:
        raise ValueError(
            "The environment variable KERAS_TP_TIMEOUT is how long a process "
            "waits for the others, in seconds: a number above 0. Received: "
            f"KERAS_TP_TIMEOUT={given!r}"
        )
    return seconds


def not_called_by_all(what, index, count, seconds, missing):
    """Returns the error of a collective that only some processes called.

    Args:
        what: String that names the collective.
        index: Int, index of this process.
        count: Int, number of processes.
        seconds: Float, how long the others were waited for.
        missing: String that says which processes did not come.
    """
    return (
        f"{what} is a collective of {count} processes: every process has to "
        f"call it. Process {index} did, and others did not within "
        f"{seconds:g} seconds: move the call out of any `if rank == 0:` or "
        f"`if process_id == 0:`. Missing: {missing}"
    )


def meanwhile(places):
    """Returns a sentence about processes that wait for something else.

    Args:
        places: Dict of the index of a process to a string that names what it
            waits for. If it is empty, so is the sentence.
    """
    if not places:
        return ""
    where = ", ".join(f"process {i} at {what}" for i, what in places.items())
    return (
        f" Others wait elsewhere: {where}. What one process calls, every "
        "process has to call: move it out of any `if rank == 0:`."
    )


@contextlib.contextmanager
def longer():
    """Within it the others are waited for up to `LONGEST_S` seconds.

    For what one process does while the others wait, and which takes as long
    as it takes: all of them have come already. One that ends is noticed at
    once.
    """
    _longer.append(LONGEST_S)
    try:
        yield
    finally:
        _longer.pop()


def is_longer():
    """Returns whether the others are waited for up to `LONGEST_S` seconds."""
    return bool(_longer)


def patience(seconds):
    """Returns how long to wait for the others now, instead of `seconds`."""
    return max([seconds, *_longer])
