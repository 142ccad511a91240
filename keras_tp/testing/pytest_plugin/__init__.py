"""The command `pytest --pyargs keras_tp.testing --backend NAME`.

Installed as a package of its own, `keras_tp_pytest`: pytest imports it in each
of its runs, and `keras_tp` would import Keras.
"""

import os
import subprocess
import sys

SUITE = "keras_tp.testing"
# Backends of keras_tp -> Keras's: without the variable, Keras imports
# TensorFlow, which need not be installed.
KERAS = {
    "jax": "jax",
    "tensorflow": "tensorflow",
    "torch": "torch",
    "torch_xla": "torch",
}


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
    backend = getattr(config.option, "backend", None)
    if backend is None:
        return None
    given = list(config.invocation_params.args)
    if SUITE not in given:
        return None
    others = [arg for arg in given if arg not in ("--pyargs", SUITE)]
    environment = dict(os.environ)
    if backend in KERAS:
        environment.setdefault("KERAS_BACKEND", KERAS[backend])
    command = [sys.executable, "-m", SUITE, *others]
    return subprocess.run(command, env=environment).returncode
