"""Eight virtual devices, and a process as it was before, for every test."""

import gc
import os

# All of this is read when Keras, or its backend, is imported first.
os.environ.setdefault("KERAS_BACKEND", "jax")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("KERAS_TP_CPU_DEVICES", "8")
_COUNT = "--xla_force_host_platform_device_count"
if _COUNT not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = (
        os.environ.get("XLA_FLAGS", "") + f" {_COUNT}=8"
    ).strip()
# Set in many containers: `print` then writes the end of a line apart, and the
# lines of several processes that a test reads would mix.
os.environ.pop("PYTHONUNBUFFERED", None)

import keras
import pytest
from keras.src.utils import python_utils

import keras_tp
from integration_tests import slow_tests
from integration_tests.slow_tests import pytest_collection_modifyitems
from integration_tests.slow_tests import pytest_configure
from keras_tp.backend.saving import stored_arrays

slow_tests.optimize_less()


def _settings():
    """Returns the variables that give a process its devices, and the like."""
    prefixes = "CPU_", "JAX_", "KERAS_", "XLA_"
    return {k: v for k, v in os.environ.items() if k.startswith(prefixes)}


_SETTINGS = _settings()


def pytest_collection_finish(session):
    """All files are imported first, and one must not change what others get."""
    if _settings() != _SETTINGS:
        raise pytest.UsageError(
            "Importing the tests changed environment variables, which later "
            f"tests would get. Before: {_SETTINGS}; after: {_settings()}"
        )


def _reset():
    # In this order: `clear_session` keeps a distribution while keras_tp is
    # installed.
    keras_tp.distribution.set_distribution(None)
    keras_tp.uninstall()
    keras.utils.clear_session()
    # It looks for garbage among all objects. What is alive by now, nearly all
    # of it imported modules, the next one need not look at again.
    gc.freeze()
    keras.config.set_dtype_policy("float32")


@pytest.fixture(autouse=True)
def reset_global_state():
    _reset()
    yield
    _reset()


@pytest.fixture
def logs_read(monkeypatch):
    """List with a boolean for each dict of logs that Keras has read.

    It is `False` where the dict was empty.
    """
    found = []
    original = python_utils.pythonify_logs

    def pythonify_logs(logs):
        found.append(bool(logs))
        return original(logs)

    monkeypatch.setattr(python_utils, "pythonify_logs", pythonify_logs)
    return found


@pytest.fixture
def copied(monkeypatch):
    """Bytes of the parts that are read of arrays in files, as a list.

    Small arrays stay in their files, too.
    """
    monkeypatch.setattr(stored_arrays, "_LARGE_BYTES", 0)
    found, original = [], stored_arrays.copy_to

    def noted(target, *args):
        found.append(target.nbytes)
        original(target, *args)

    monkeypatch.setattr(stored_arrays, "copy_to", noted)
    return found
