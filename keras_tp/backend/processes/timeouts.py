"""The time that a process waits for the others, and errors after it."""

import contextlib
import math
import os

# Longest wait for a process that writes a file, in seconds.
LONGEST_S = 3600
_longer = []


def timeout():
    """Returns the seconds that a process waits for the others of its run.

    The environment variable KERAS_TP_TIMEOUT sets them. Defaults to 45.
    """
    given = os.environ.get("KERAS_TP_TIMEOUT", "45")
    try:
        seconds = float(given)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < math.inf:
        raise ValueError(
            "The environment variable KERAS_TP_TIMEOUT must be the number of "
            "seconds that a process waits for the others, greater than 0. "
            f"Received: KERAS_TP_TIMEOUT={given!r}"
        )
    return seconds


def not_called_by_all(what, index, count, seconds, missing):
    """Returns the error message for a collective that some did not call."""
    return (
        f"{what} is a collective of {count} processes: every process has to "
        f"call it. Process {index} called it, but others did not within "
        f"{seconds:g} seconds. Move the call out of any `if rank == 0:` or `if "
        f"process_id == 0:`. Missing: {missing}"
    )


def meanwhile(places):
    """Returns a sentence about processes that wait at other collectives.

    Args:
        places: Dict from the index of a process to the name of its collective.
    """
    if not places:
        return ""
    where = ", ".join(f"process {i} at {what}" for i, what in places.items())
    return (
        f" Others wait elsewhere: {where}. Every process has to call the same "
        "collectives: move each call out of any `if rank == 0:`."
    )


@contextlib.contextmanager
def longer():
    """Context in which processes wait for each other up to `LONGEST_S` seconds.

    Use it after all processes have met, while one of them does work of unknown
    length, such as writing a file. A process that ends is still noticed at
    once.
    """
    _longer.append(LONGEST_S)
    try:
        yield
    finally:
        _longer.pop()


def is_longer():
    """Returns whether processes wait for each other up to `LONGEST_S`."""
    return bool(_longer)


def patience(seconds):
    """Returns the seconds to wait now: `seconds`, or more within `longer`."""
    return max([seconds, *_longer])
