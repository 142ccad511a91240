"""Runs a script on several devices: `python -m keras_tp.launch`."""

import argparse

from keras_tp import backend


def main(argv=None):
    """Parses a command line and runs its script.

    Args:
        argv: List of strings. Defaults to the process's own.
    """
    parser = argparse.ArgumentParser(
        prog="python -m keras_tp.launch",
        # A script may have options that begin like these.
        allow_abbrev=False,
        description=(
            "Runs a script on several devices of this machine: virtual CPU "
            "devices in one process where there is no accelerator and the "
            "backend (KERAS_BACKEND) has them."
        ),
    )
    parser.add_argument(
        "--devices", type=int, required=True, help="number of devices"
    )
    parser.add_argument("script", help="Python file to run")
    parser.add_argument(
        "args", nargs=argparse.REMAINDER, help="arguments of the script"
    )
    options = parser.parse_args(argv)
    if options.devices < 1:
        parser.error(f"--devices must be at least 1, not {options.devices}")
    backend.distribution_lib.launch(
        options.devices, [options.script, *options.args]
    )


if __name__ == "__main__":
    main()
