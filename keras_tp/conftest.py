"""Tests start and end without a distribution and with Keras as released."""

import gc
import os

import keras
import pytest

import keras_tp
from integration_tests import slow_tests
from integration_tests.slow_tests import pytest_collection_modifyitems
from integration_tests.slow_tests import pytest_configure
from keras_tp.backend import SUPPORTED_BACKENDS
from keras_tp.backend import current

# One backend per process: the tests of the others cannot be imported.
collect_ignore = [
    f"backend/{name}" for name in SUPPORTED_BACKENDS if name != current.name()
]
if current.CHOICE not in os.environ:
    # `integration_tests/conformance_test.py` runs it in processes of its own.
    collect_ignore.append("testing")

# Set in many containers: `print` then writes the end of a line apart, and the
# lines of several processes that a test reads would mix.
os.environ.pop("PYTHONUNBUFFERED", None)
if keras.config.backend() == "tensorflow":
    os.environ.setdefault("KERAS_TP_CPU_DEVICES", "8")
    # Makes them, before TensorFlow does anything else.
    keras_tp.distribution.list_devices()
slow_tests.optimize_less()
if keras.config.backend() == "jax":
    # Read when JAX makes its devices, which nothing has done yet.
    count = "--xla_force_host_platform_device_count"
    flags = os.environ.get("XLA_FLAGS", "")
    if count not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} {count}=8".strip()


def reset():
    """Clears Keras's global state and takes the hooks out."""
    keras_tp.distribution.set_distribution(None)
    keras.utils.clear_session()
    # It looks for garbage among all objects. What is alive by now, nearly all
    # of it imported modules, the next one need not look at again.
    gc.freeze()
    keras_tp.uninstall()


@pytest.fixture(autouse=True)
def fresh_state():
    reset()
    yield
    reset()
