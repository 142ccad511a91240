"""A model that is loaded does not draw its first values."""

import keras
import numpy as np
import pytest
from keras import layers

from integration_tests import harness
from keras_tp import distribution
from keras_tp.backend import distribution_lib as lib
from keras_tp.backend.saving import expected_values

LAYOUTS = {"up/kernel": (None, "model"), "down/kernel": ("model", None)}


@pytest.fixture
def drawn(monkeypatch):
    """Shapes of the values that are drawn, as a list. All count as large."""
    monkeypatch.setattr(expected_values, "_LARGE_NUMBERS", 0)
    kind, found = keras.initializers.GlorotUniform, []
    original = kind.__call__

    def noted(self, shape, *args, **kwargs):
        found.append(tuple(shape))
        return original(self, shape, *args, **kwargs)

    monkeypatch.setattr(kind, "__call__", noted)
    return found


def under(planned=False):
    mesh = harness.mesh(harness.fitted((1, 2)))
    if planned:
        plan = distribution.plan_sharding(build, mesh)
        return plan.distribution().scope()
    layout_map = distribution.LayoutMap(mesh)
    for pattern, axes in LAYOUTS.items():
        layout_map[pattern] = axes
    return distribution.ModelParallel(layout_map=layout_map).scope()


def build(seed=3):
    """Two kernels that are split and, without a layout, a third one."""
    keras.utils.set_random_seed(seed)
    inputs = keras.Input((8,))
    x = layers.Dense(16, activation="relu", name="up")(inputs)
    x = layers.Dense(8, name="down")(x)
    model = keras.Model(inputs, layers.Dense(5, name="head")(x))
    model.compile("adam", "mse")
    return model


def saved(path):
    """Saves a trained model of one device; returns its values."""
    model = build()
    x = np.random.default_rng(0).normal(size=(4, 8)).astype("float32")
    model.train_on_batch(x, np.ones((4, 5), "float32"))
    if lib.process_id() == 0:
        model.save(path, zipped=path.suffix == ".keras")
    lib.meet("The file")
    return values_of(model)


def values_of(model):
    return [
        np.array(keras.ops.convert_to_numpy(variable))
        for variable in (*model.weights, *model.optimizer.variables)
    ]


def assert_same(found, expected):
    for new, value in zip(found, expected, strict=True):
        np.testing.assert_array_equal(new, value)


@pytest.mark.parametrize("planned", [False, True])
@pytest.mark.parametrize("name", ["m.keras", "folder"])
def test_what_is_loaded_is_not_drawn(name, planned, tmp_path, drawn):
    expected = saved(tmp_path / name)
    scope = under(planned)
    drawn.clear()
    with scope:
        model = keras.saving.load_model(tmp_path / name)
        split = [
            tuple(weight.shape)
            for weight in model.weights
            if any(weight._layout.axes)
        ]
        assert len(split) >= 2 and not drawn
        assert_same(values_of(model), expected)


def test_a_checkpoint_is_not_drawn(tmp_path, drawn):
    with under():
        model = build(seed=9)
        model.save(tmp_path / "m.safetensors")
        expected = model.get_weights()
        drawn.clear()
        model = keras.saving.load_model(tmp_path / "m.safetensors")
        assert not drawn
        assert_same(model.get_weights(), expected)


def test_what_is_not_loaded_is_drawn_in_the_end(drawn):
    expected = [np.array(value) for value in build().get_weights()]
    with under():
        with expected_values.context():
            drawn.clear()
            model = build()
            assert not drawn
            up = model.get_layer("up").kernel
            up.assign(np.ones(up.shape, "float32"))
        assert sorted(drawn) == [(8, 5), (16, 8)]
        expected[0] = np.ones(up.shape)
        assert_same(values_of(model)[: len(expected)], expected)


@pytest.mark.parametrize(
    "read",
    [
        keras.ops.convert_to_numpy,
        lambda variable: keras.ops.convert_to_numpy(variable.value),
        lambda variable: keras.ops.convert_to_numpy(variable + 0),
    ],
)
def test_a_value_that_is_read_before_is_drawn(read, drawn):
    expected = build().get_layer("up").kernel.numpy()
    with under(), expected_values.context():
        kernel = build().get_layer("up").kernel
        np.testing.assert_array_equal(read(kernel), expected)
        assert not expected_values.is_waiting(kernel)


def test_after_an_error_values_are_drawn_where_they_are_read(drawn):
    expected = build().get_layer("up").kernel.numpy()
    with under():
        with pytest.raises(ZeroDivisionError), expected_values.context():
            kernel = build().get_layer("up").kernel
            raise ZeroDivisionError
        np.testing.assert_array_equal(
            keras.ops.convert_to_numpy(kernel), expected
        )
        drawn.clear()
        build()
        assert len(drawn) == 3


def test_a_value_of_another_shape_leaves_the_first_value(drawn):
    expected = build().get_layer("up").kernel.numpy()
    with under(), expected_values.context():
        kernel = build().get_layer("up").kernel
        with pytest.raises(ValueError, match="shape"):
            kernel.assign(np.ones((3, 3), "float32"))
        np.testing.assert_array_equal(
            keras.ops.convert_to_numpy(kernel), expected
        )
