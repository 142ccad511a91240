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


def patience(seconds):
    """Returns how long to wait for the others now, instead of `seconds`."""
    return max([seconds, *_longer])
