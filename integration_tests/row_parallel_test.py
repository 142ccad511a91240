"""Row-parallel layers: one all-reduce, one bias; dropout, and many steps.

README.md of this folder names the row that each test shows.
"""

import keras
import numpy as np
import pytest
from keras import layers

from integration_tests import harness
from integration_tests import zoo

BACKEND = keras.config.backend()
SHAPES = harness.shapes((1, 2), (1, 4))
FEATURES, UNITS, OUTPUTS, BATCH = 12, 64, 5, 4


def pair(activation=None):
    keras.utils.set_random_seed(1)
    inputs = keras.Input((FEATURES,))
    x = zoo.dense(UNITS, "up", activation="relu")(inputs)
    x = zoo.dense(OUTPUTS, "down", activation=activation)(x)
    model = keras.Model(inputs, x, name="pair")
    model.compile(keras.optimizers.SGD(0.05), "mse")
    return model


def data():
    rng = np.random.default_rng(0)
    return (
        rng.standard_normal((BATCH, FEATURES), "float32"),
        rng.standard_normal((BATCH, OUTPUTS), "float32"),
    )


@SHAPES
@pytest.mark.parametrize("activation", [None, "relu", "softmax"])
def test_the_output_of_a_row_layer_is_always_reduced(activation, shape):
    """Also before what is not linear, where adding up later is wrong."""
    x, _ = data()
    want = pair(activation).predict(x, verbose=0)
    with harness.model_parallel(zoo.UP_AND_DOWN, shape).scope():
        model = pair(activation)
    np.testing.assert_allclose(model.predict(x, verbose=0), want, atol=1e-6)


@SHAPES
def test_the_bias_of_a_row_layer_is_added_once(shape):
    with harness.model_parallel(zoo.UP_AND_DOWN, shape).scope():
        model = pair()
    down = model.get_layer("down")
    down.kernel.assign(np.zeros((UNITS, OUTPUTS), "float32"))
    bias = np.linspace(0.5, 1.0, OUTPUTS, dtype="float32")
    down.bias.assign(bias)
    got = model.predict(data()[0], verbose=0)
    np.testing.assert_array_equal(got, np.tile(bias, (BATCH, 1)))


@SHAPES
def test_steps_1_5_and_20(shape):
    plain = pair()
    with harness.model_parallel(zoo.UP_AND_DOWN, shape).scope():
        model = pair()
    first = None
    for step in range(1, 21):
        want = np.ravel(plain.train_on_batch(*data()))[0]
        got = np.ravel(model.train_on_batch(*data()))[0]
        first = want if first is None else first
        if step in (1, 5, 20):
            np.testing.assert_allclose(got, want, rtol=1e-5, err_msg=str(step))
    assert want < 0.5 * first


@SHAPES
def test_masks_where_a_tensor_is_split_and_where_it_is_whole(shape):
    """Ones go in: what comes out is twice the mask."""

    def masks():
        keras.utils.set_random_seed(3)
        inputs = keras.Input((FEATURES,))
        x = layers.Dropout(0.5, name="whole")(inputs)
        y = layers.Dense(
            UNITS,
            kernel_initializer="zeros",
            bias_initializer="ones",
            name="up",
        )(inputs)
        y = layers.Dropout(0.5, name="split")(y)
        model = keras.Model(inputs, [x, y], name="masks")
        found = model(np.ones((BATCH, FEATURES), "float32"), training=True)
        return [keras.ops.convert_to_numpy(mask) for mask in found]

    want = masks()
    layouts = {"up/kernel": zoo.COLUMN, "up/bias": zoo.SPLIT}
    with harness.model_parallel(layouts, shape).scope():
        got = masks()
    for mask in got:
        assert set(np.unique(mask)) == {0.0, 2.0}
    parts = np.split(got[1], shape[1], axis=1)
    for part in parts[1:]:
        # Not the numbers of one generator on each device.
        assert np.mean(part != parts[0]) > 0.2
    for mask, plain in zip(got, want):
        np.testing.assert_array_equal(mask, plain)
