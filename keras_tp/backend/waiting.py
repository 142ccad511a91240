"""How long a process waits for the others."""

import math
import os


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
