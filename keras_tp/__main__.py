"""The command line: `python -m keras_tp`, or `keras-tp`."""

import argparse
import sys

from keras_tp import launch
from keras_tp.command_line import doctor
from keras_tp.command_line import fit_on
from keras_tp.command_line import lint
from keras_tp.command_line import plan
from keras_tp.command_line.options import UsageError

COMMANDS = {"plan": plan, "fit-on": fit_on, "lint": lint, "doctor": doctor}


def main():
    """Runs the command that the command line names; returns the exit code."""
    if sys.argv[1:2] == ["launch"]:
        # The launcher reads the rest by itself: some of it is the script's.
        del sys.argv[1]
        return launch.main()
    parser = argparse.ArgumentParser(
        prog="keras-tp",
        description="Plans, checks and runs Keras models on several devices.",
        epilog="Each command has its own --help.",
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, module in COMMANDS.items():
        command = commands.add_parser(
            name, help=module.HELP, description=module.__doc__
        )
        module.add_arguments(command)
        command.set_defaults(run=module.run, error=command.error)
    commands.add_parser("launch", help="run a script on several devices")
    options = parser.parse_args()
    try:
        return options.run(options)
    except UsageError as e:
        return options.error(str(e))


if __name__ == "__main__":
    sys.exit(main())
