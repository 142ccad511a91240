"""Runs the tests of a backend on several devices.

    python -m keras_tp.testing --backend torch --devices 2 -k parity

Arguments that are not known here go to pytest.
"""

import argparse
import os
import pathlib
import subprocess
import sys
import tempfile

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
    parser.add_argument(
        "--processes",
        help="number of processes (default: one, on torch one for each device)",
    )
    options, others = parser.parse_known_args()
    try:
        own = declarations.keras_backend(options.backend)
    except ValueError as e:
        parser.error(str(e))
    variables = {"KERAS_BACKEND": own, "KERAS_TP_BACKEND": options.backend}
    folder = tempfile.TemporaryDirectory(prefix="keras_tp_testing_")
    variables["KERAS_TP_TESTING_FOLDER"] = folder.name
    command = [sys.executable, "-m", "keras_tp.launch", "--devices"]
    command.append(str(options.devices))
    if options.processes is not None:
        command += ["--processes", options.processes]
    command += [str(SUITE), *others]
    with folder:
        environment = {**os.environ, **variables}
        return subprocess.run(command, env=environment).returncode


if __name__ == "__main__":
    sys.exit(main())
