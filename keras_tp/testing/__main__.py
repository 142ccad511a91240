"""Runs the tests of a backend on several devices.

    python -m keras_tp.testing --backend torch --devices 2 -k parity

Arguments that are not known here go to pytest.
"""

import argparse
import os
import pathlib
import subprocess
import sys

from keras_tp.testing import declarations

SUITE = pathlib.Path(__file__).with_name("suite.py")


def main():
    """Launches `suite.py` with the variables that choose the backend."""
    parser = argparse.ArgumentParser(
        prog="python -m keras_tp.testing", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--backend", required=True, help="its name")
    parser.add_argument(
        "--devices", type=int, default=2, help="number (default: %(default)s)"
    )
    options, others = parser.parse_known_args()
    try:
        own = declarations.keras_backend(options.backend)
    except ValueError as e:
        parser.error(str(e))
    variables = {"KERAS_BACKEND": own, "KERAS_TP_BACKEND": options.backend}
    command = [sys.executable, "-m", "keras_tp.launch", "--devices"]
    command += [str(options.devices), str(SUITE), *others]
    return subprocess.run(command, env={**os.environ, **variables}).returncode


if __name__ == "__main__":
    sys.exit(main())
