"""The command `pytest --pyargs keras_tp.testing --backend NAME`.

Installed as a package of its own, `keras_tp_pytest`: pytest imports it in each
of its runs, and `keras_tp` would import Keras.
"""

import subprocess
import sys

SUITE = "keras_tp.testing"


def pytest_load_initial_conftests(early_config, parser, args):
    """Adds the options of the suite to the runs that are its own.

    Other projects may have options of these names.
    """
    if SUITE in args:
        group = parser.getgroup("keras_tp")
        group.addoption("--backend", help="name of the backend to test")
        group.addoption("--devices", help="number of devices")
        group.addoption("--processes", help="number of processes")


def pytest_cmdline_main(config):
    """Has the suite launch its own processes, with the same arguments."""
    if getattr(config.option, "backend", None) is None:
        return None
    given = list(config.invocation_params.args)
    if SUITE not in given:
        return None
    others = [arg for arg in given if arg not in ("--pyargs", SUITE)]
    return subprocess.run([sys.executable, "-m", SUITE, *others]).returncode
