"""The commands that error messages tell users to run, and what they run."""

import os
import runpy
import sys


def script():
    """Returns the script of this process, as it was named."""
    return sys.argv[0] or "script.py"


def launch(device_count):
    """Returns the command that runs this script on devices."""
    return f"python -m keras_tp.launch --devices {device_count} {script()}"


def run_script(argv):
    """Runs a script in this process, as if Python had been started with it.

    Args:
        argv: List of strings: the script and its arguments.
    """
    sys.argv = list(argv)
    sys.path[0] = os.path.dirname(os.path.abspath(argv[0]))
    runpy.run_path(argv[0], run_name="__main__")
