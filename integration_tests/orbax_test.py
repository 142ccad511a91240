"""Checkpoints of Orbax: the values that were saved, or an error."""

import keras
import numpy as np
import pytest

from integration_tests import harness
from keras_tp import distribution
from keras_tp.backend import distribution_lib as lib
from keras_tp.testing import saving_test

pytest.importorskip(
    "orbax.checkpoint", reason="orbax-checkpoint is not installed"
)

LAYOUTS = {"(.*/)?up/kernel": (None, "model")}
KINDS = ["sequential", "functional"]


def network(kind, units=8):
    # The names are numbered as in a script that makes several models.
    layers = [
        keras.layers.Dense(units, "relu", name="up"),
        keras.layers.Dropout(0.5),
        keras.layers.Dense(units),
        keras.layers.Dropout(0.5),
        keras.layers.Dense(4),
    ]
    if kind == "sequential":
        model = keras.Sequential([keras.Input((6,)), *layers])
    else:
        inputs = x = keras.Input((6,))
        for layer in layers:
            x = layer(x)
        model = keras.Model(inputs, x)
    model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
    return model


def fit(model, folder, **arguments):
    rng = np.random.default_rng(5)
    x = rng.standard_normal((8, 6), "float32")
    y = rng.standard_normal((8, 4), "float32")
    callback = keras.callbacks.OrbaxCheckpoint(str(folder), **arguments)
    model.fit(x, y, epochs=2, verbose=0, callbacks=[callback])


def state_of(model):
    variables = [*model.variables, *model.optimizer.variables]
    metrics = {id(v) for v in model.metrics_variables}
    return [
        keras.ops.convert_to_numpy(v) for v in variables if id(v) not in metrics
    ]


def assert_same(actual, expected):
    assert len(actual) == len(expected)
    for a, b in zip(actual, expected):
        np.testing.assert_array_equal(a, b)


def scope():
    count = distribution.get_device_count()
    if lib.num_processes() > 1:
        return harness.model_parallel(LAYOUTS, (1, count), strict=False).scope()
    shape = harness.fitted((1, 2) if count > 1 else (1, 1))
    return harness.model_parallel(LAYOUTS, shape, strict=False).scope()


@pytest.mark.filterwarnings("ignore:No pattern of the LayoutMap")
@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_model_that_is_loaded(kind, background, tmp_path):
    with scope():
        network(kind)
        model = network(kind)
        fit(model, tmp_path, save_on_background=background)
        loaded = keras.saving.load_model(str(tmp_path))
    assert_same(state_of(loaded), state_of(model))


@pytest.mark.filterwarnings("ignore:No pattern of the LayoutMap")
def test_another_mesh(tmp_path):
    """From a split model to one that is split in another way, and back."""
    count = distribution.get_device_count()
    if count == 1:
        pytest.skip("one device has one mesh")
    # A run of several processes has as many devices as its mesh.
    size = count if lib.num_processes() > 1 else 4
    shapes = [(1, size), (size, 1), (1, size)]
    with harness.model_parallel(LAYOUTS, shapes[0], strict=False).scope():
        model = network("functional")
        fit(model, tmp_path / "0", save_on_background=False)
        expected = state_of(model)
    for index, shape in enumerate(shapes[1:]):
        layouts = {"(.*/)?up/bias": ("model",)} if index else LAYOUTS
        with harness.model_parallel(layouts, shape, strict=False).scope():
            model = keras.saving.load_model(str(tmp_path / str(index)))
            assert_same(state_of(model), expected)
            callback = keras.callbacks.OrbaxCheckpoint(
                str(tmp_path / str(index + 1)), save_on_background=False
            )
            callback.set_model(model)
            callback._save_checkpoint(step=0)
            callback.wait_until_finished()


@pytest.mark.filterwarnings("ignore:No pattern of the LayoutMap")
def test_a_variable_without_a_value(tmp_path, monkeypatch):
    with scope():
        inputs = keras.Input((6,))
        outputs = keras.layers.Dense(4)(saving_test.Grown(8, name="up")(inputs))
        model = keras.Model(inputs, outputs)
        model.compile("adam", "mse")
        fit(model, tmp_path, save_on_background=False)
        monkeypatch.setattr(saving_test.Grown, "is_grown", True)
        with pytest.raises(ValueError, match="up/more"):
            keras.saving.load_model(
                str(tmp_path), custom_objects={"Grown": saving_test.Grown}
            )


@pytest.mark.filterwarnings("ignore:No pattern of the LayoutMap")
def test_a_model_that_was_never_trained(tmp_path):
    # Its optimizer has no slots yet.
    with scope():
        model = network("functional")
        callback = keras.callbacks.OrbaxCheckpoint(str(tmp_path))
        callback.set_model(model)
        callback._save_checkpoint(step=0)
        callback.wait_until_finished()
        loaded = keras.saving.load_model(str(tmp_path))
    assert_same(loaded.get_weights(), model.get_weights())


@pytest.mark.filterwarnings("ignore:No pattern of the LayoutMap")
@pytest.mark.parametrize("kind", KINDS)
def test_weights_that_are_loaded(kind, tmp_path):
    with scope():
        model = network(kind)
        fit(model, tmp_path, save_on_background=False)
        loaded = network(kind)
        loaded.optimizer.build(loaded.trainable_variables)
        loaded.load_weights(str(tmp_path))
    assert_same(state_of(loaded), state_of(model))


@pytest.mark.filterwarnings("ignore:No pattern of the LayoutMap")
@pytest.mark.parametrize(
    "tree, problem",
    [
        ({"up": {"kernel": np.ones((6, 9))}}, "other/up/kernel|shapes differ"),
        ({"net": {"other": {"bias": np.ones(8)}}}, r"\['net/other/bias'\]"),
    ],
)
def test_values_without_a_variable(tree, problem):
    with scope():
        model = network("sequential")
        before = state_of(model)
        with pytest.raises(ValueError, match=problem):
            model.set_state_tree({"trainable_variables": tree})
    assert_same(state_of(model), before)


def test_a_part_of_the_values():
    with scope():
        model = network("functional")
        kernel = np.arange(48.0).reshape(6, 8)
        model.set_state_tree(
            {"trainable_variables": {"up": {"kernel": kernel}}}
        )
        held = keras.ops.convert_to_numpy(model.get_layer("up").kernel)
    np.testing.assert_array_equal(held, kernel)
