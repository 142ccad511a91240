"""Tests start and end with Keras as released; declared ones are left out."""

import keras
import pytest

import keras_tp
from keras_tp import backend
from keras_tp.backend import current
from keras_tp.testing import declarations


def pytest_collection_modifyitems(items):
    """Skips what the backend says that it cannot do.

    Raises:
        pytest.UsageError: if there is one device only.
    """
    if len(keras_tp.distribution.list_devices()) < 2:
        raise pytest.UsageError(
            "These tests need several devices. Run "
            "`pytest --pyargs keras_tp.testing --backend NAME`."
        )
    count = backend.distribution_lib.num_processes()
    declared = declarations.cannot(current.name(), count)
    for item in items:
        if item.path.parent.name != "testing":
            continue
        names = item.name, getattr(item, "originalname", item.name)
        for reason in (declared[n] for n in names if n in declared):
            item.add_marker(pytest.mark.skip(reason=f"declared: {reason}"))


def _reset():
    keras_tp.distribution.set_distribution(None)
    keras_tp.uninstall()
    keras.utils.clear_session()


@pytest.fixture(autouse=True)
def as_released():
    _reset()
    yield
    _reset()
