"""Runs a benchmark again in the processes of its devices."""

import argparse
import os
import sys


def add_argument(parser):
    """Adds the argument that tells the processes from the first one."""
    parser.add_argument(
        "--launched", action="store_true", help=argparse.SUPPRESS
    )


def in_processes(options):
    """Runs the script in `options.devices` processes, and ends this one.

    Returns at once in one of those. To be called before Keras is imported: the
    devices have to exist before the backend starts.
    """
    from keras_tp import launch

    if options.launched:
        return
    script = os.path.abspath(sys.argv[0])
    arguments = [*sys.argv[1:], "--launched"]
    places = ["--devices", str(options.devices)]
    if getattr(options, "processes", None):
        places += ["--processes", str(options.processes)]
    launch.main([*places, script, *arguments])
    sys.exit()
