"""Says at the end of a run if its script has not used the devices."""

import atexit
import os
import sys

from keras.src.distribution.distribution_lib import distribution

from keras_tp.backend import hooks
from keras_tp.startup import LAUNCHER


def tell(devices):
    """Writes a line to stderr if nothing was distributed in this process.

    Args:
        devices: Int, the number of devices of the run.
    """
    is_used = hooks.was_installed() or distribution() is not None
    if devices < 2 or is_used:
        return
    sys.stderr.write(
        f"[keras_tp.launch] Nothing was split over the {devices} devices: the "
        "script set no distribution. Call `set_distribution` before the model "
        "is built, or build it in `with distribution.scope():`.\n"
    )


def watch():
    """Has a process that torchrun starts for the launcher call `tell`."""
    devices = int(os.environ.get("WORLD_SIZE", 1))
    if LAUNCHER in os.environ and os.environ.get("RANK") == "0":
        atexit.register(_tell_at_exit, devices)


def _tell_at_exit(devices):
    # Set by an error that ended the script.
    if getattr(sys, "last_value", None) is None:
        tell(devices)
