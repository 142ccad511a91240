import pathlib
import re
import sys
import types

import keras
import numpy as np
import pytest

import keras_tp
from keras_tp.backend import current
from keras_tp.backend import hooks
from keras_tp.backend.hooks import Hook

MODEL = "keras.src.models.model:Model"


def call_inner(original):
    return lambda *args, **kwargs: original(*args, **kwargs)


def test_install_replaces_and_uninstall_puts_the_same_object_back():
    inherited = keras.Model.fit
    own = keras.Model.save
    hooks.install(
        [
            Hook(MODEL, "fit", call_inner, "a test"),
            Hook(MODEL, "save", call_inner, "a test"),
        ]
    )
    assert keras.Model.fit is not inherited
    assert keras.Model.save is not own
    hooks.uninstall()
    assert keras.Model.fit is inherited
    assert "fit" not in vars(keras.Model)
    assert keras.Model.save is own


def test_a_second_install_does_nothing():
    keras_tp.install()
    replaced = keras.Model.fit
    keras_tp.install()
    assert keras.Model.fit is replaced


def test_a_moved_attribute_is_named_and_nothing_stays_replaced():
    fit = keras.Model.fit
    with pytest.raises(RuntimeError) as e:
        hooks.install(
            [
                Hook(MODEL, "fit", call_inner, "a test"),
                Hook(MODEL, "fitt", call_inner, "models train"),
            ]
        )
    for text in (keras.__version__, f"{MODEL}.fitt", "so that models train"):
        assert text in str(e.value)
    assert keras.Model.fit is fit
    assert not hooks.is_installed()


def test_a_module_that_is_gone_is_named_with_its_package():
    row = Hook("numpy.fft.moved", "fft", call_inner, "spectra are right")
    with pytest.raises(RuntimeError) as e:
        hooks.install([row])
    for text in (
        "numpy has no numpy.fft.moved.fft",
        "so that spectra are right",
        f"numpy {np.__version__}",
    ):
        assert text in str(e.value)


def test_a_class_that_is_gone_is_named():
    with pytest.raises(RuntimeError, match="model:Modell.fit"):
        hooks.install([Hook(MODEL + "l", "fit", call_inner, "a test")])


@pytest.mark.parametrize("version", ["3.14.9", "3.16.0", "4.0.1"])
def test_other_versions_of_keras_are_refused(monkeypatch, version):
    fake = types.SimpleNamespace(__version__=version)
    monkeypatch.setattr(hooks, "keras", fake)
    with pytest.raises(ImportError) as e:
        keras_tp.install()
    for text in (version, "keras>=3.15,<3.16", "pip install"):
        assert text in str(e.value)
    assert not hooks.is_installed()


OLD = {
    "jax": "0.6.2",
    "tensorflow": "2.19.1",
    "torch": "2.12.1+cpu",
    "torch_xla": "2.8.1",
}


def test_versions_of_the_framework_that_are_too_old_are_refused(monkeypatch):
    name = current.name()
    monkeypatch.setattr(sys.modules[name], "__version__", OLD[name])
    with pytest.raises(ImportError, match="pip install") as e:
        keras_tp.install()
    major, minor = hooks.MINIMUM_VERSIONS[name]
    for text in (OLD[name], f"'{name}>={major}.{minor}'"):
        assert text in str(e.value)
    assert not hooks.is_installed()


def test_setup_asks_for_the_versions_that_are_checked():
    text = pathlib.Path(__file__).parents[2].joinpath("setup.py").read_text()
    for name, (major, minor) in hooks.MINIMUM_VERSIONS.items():
        asked = re.findall(rf'"{name}>=([\d.]+)[",]', text)
        assert asked and set(asked) == {f"{major}.{minor}"}


def test_every_row_says_why_and_appears_once():
    from keras_tp.backend import distribution_lib
    from keras_tp.distribution import model_hooks

    for hook in model_hooks.TABLE + distribution_lib.hook_table():
        assert hook.why and hook.why[-1] not in "."
        if hook.is_due():
            hook.resolve()
    table = distribution_lib.hook_table()
    names = [(hook.owner, name) for hook in table for name in hook.attributes]
    assert len(set(names)) == len(names)


# Each row is one more thing that a new version of Keras can break.
MOST_ROWS = {"jax": 20, "tensorflow": 65, "torch": 45, "torch_xla": 25}


def test_a_backend_has_few_rows_of_its_own():
    from keras_tp.backend import distribution_lib
    from keras_tp.backend.processes import callbacks
    from keras_tp.backend.processes import data_shards
    from keras_tp.backend.saving import one_writer

    shared = callbacks.table() + data_shards.table(None) + one_writer.table(all)
    table = distribution_lib.hook_table()
    if current.name() == "torch_xla":
        # It has one process, which shares no data.
        shared = callbacks.table() + one_writer.table(all)
    owners = {hook.owner for hook in shared}
    own = [hook for hook in table if hook.owner not in owners]
    assert len(table) == len(own) + len(shared)
    assert len(own) <= MOST_ROWS[current.name()]


def test_what_waits_is_replaced_once_it_is_imported(monkeypatch):
    module = types.ModuleType("some_models")
    module.Model = type("Model", (), {"generate": lambda self: 3})
    original = module.Model.generate
    row = Hook(
        "some_models:Model", "generate", call_inner, "a test", waits=True
    )
    hooks.install([row])
    hooks.install_imported()
    assert hooks.is_installed() is False
    monkeypatch.setitem(sys.modules, "some_models", module)
    hooks.install_imported()
    replaced = module.Model.generate
    assert replaced is not original
    hooks.install_imported()
    assert module.Model.generate is replaced
    hooks.uninstall()
    assert module.Model.generate is original
    hooks.install_imported()
    assert module.Model.generate is original


def test_what_waits_and_has_moved_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "some_models", types.ModuleType("x"))
    row = Hook(
        "some_models:Model", "generate", call_inner, "it works", waits=True
    )
    with pytest.raises(RuntimeError, match="some_models:Model.generate"):
        hooks.install([row])
