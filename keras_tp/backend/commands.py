"""The commands that error messages tell users to run."""

import sys


def script():
    """Returns the script of this process, as it was named."""
    return sys.argv[0] or "script.py"


def launch(device_count):
    """Returns the command that runs this script on devices."""
    return f"python -m keras_tp.launch --devices {device_count} {script()}"
