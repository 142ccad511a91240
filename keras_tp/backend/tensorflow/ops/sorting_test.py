"""Sorting and the like along dims that are split, with gradients."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from keras_tp import distribution as dist

VALUES = np.random.default_rng(0).normal(size=(4, 6)).astype("float32")
FUNCTIONS = {
    "sort": lambda x: keras.ops.sort(x, 0),
    "argsort": lambda x: keras.ops.argsort(x, -1),
    "top_k": lambda x: keras.ops.top_k(x, 2)[0],
    "argmax": lambda x: keras.ops.argmax(tf.round(x), 0),
    "argmax of truths": lambda x: tf.argmax(x > 0, 1),
    "argmin": lambda x: keras.ops.argmin(x, -1),
    "argmin of truths": lambda x: tf.argmin(x > 0, 1),
    "argmin of integers": lambda x: tf.argmin(tf.cast(x * 9, "int32"), 0),
    "argmin of bytes": lambda x: tf.argmin(tf.cast(x * x * 9, "uint8"), 1),
    "shuffle": lambda x: keras.random.shuffle(x, 1, seed=3),
    "softsign": keras.ops.softsign,
    "sparsemax": lambda x: keras.ops.sparsemax(x, -1),
    "sparsemax of columns": lambda x: keras.ops.sparsemax(x, 0),
}


@pytest.fixture
def mesh():
    mesh = dist.DeviceMesh((1, 2), ["batch", "model"], dist.list_devices()[:2])
    layout_map = dist.LayoutMap(mesh)
    with dist.ModelParallel(layout_map=layout_map).scope():
        yield mesh


def place(mesh, dim):
    axes = ["model" if d == dim else None for d in range(2)]
    return dist.distribute_tensor(VALUES, dist.TensorLayout(axes, mesh))


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_of_what_is_split(name, dim, mesh):
    def step(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = FUNCTIONS[name](x)
            if not y.dtype.is_floating:
                return y, x
            rows = tf.reshape(tf.range(y.shape[0]), [-1, 1])
            loss = tf.reduce_sum(y * tf.cast(rows + 1, y.dtype))
        return y, tape.gradient(loss, x)

    expected = tf.function(step, autograph=False)(tf.constant(VALUES))
    # A function of the user's own, which is given what is split.
    found = tf.function(step, autograph=False)(place(mesh, dim))
    for got, wanted in zip(found, expected):
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-6)


HOLES = np.random.default_rng(1).normal(size=(4, 3, 6)).astype("float32")
HOLES[0, :2, 1] = HOLES[2, 1] = HOLES[3, :, 4] = np.nan
HOLES[1, :, 2] = [np.inf, 2, 2]


@pytest.mark.parametrize("dim", [0, 2])
@pytest.mark.parametrize(
    "arguments",
    [
        {"q": 0.5},
        {"q": 1.0, "axis": 1},
        {"q": [0.0, 0.3, 0.5], "axis": -1, "keepdims": True},
        {"q": 0.4, "axis": (0, 2)},
        *(
            {"q": [0.3, 0.8], "axis": 1, "method": method}
            for method in ("lower", "higher", "nearest", "midpoint")
        ),
    ],
    ids=str,
)
def test_quantiles_without_what_is_no_number(arguments, dim, mesh):
    def quantile(x, **others):
        return keras.ops.nanquantile(x, **{**arguments, **others})

    # On one device Keras takes one number only, where rows are left.
    q = np.array(arguments["q"])
    expected = [quantile(tf.constant(HOLES), q=one) for one in q.flatten()]
    expected = np.stack(expected).reshape([*q.shape, *expected[0].shape])
    axes = ["model" if d == dim else None for d in range(3)]
    x = dist.distribute_tensor(HOLES, dist.TensorLayout(axes, mesh))
    for function in (quantile, tf.function(quantile, autograph=False)):
        found = keras.ops.convert_to_numpy(function(x))
        np.testing.assert_allclose(found, expected, rtol=1e-6)


@pytest.mark.parametrize("size", [6, 40])
def test_sparsemax_of_equal_values_and_of_a_layer(size, mesh):
    """Equal values share; eagerly, more numbers than DTensor spreads alone."""
    x = np.round(np.random.default_rng(2).normal(size=(2, size)), 1)
    x = x.astype("float32")
    layer = keras.layers.Activation("sparsemax")
    expected = layer(tf.constant(x))
    axes = [None, "model"]
    placed = dist.distribute_tensor(x, dist.TensorLayout(axes, mesh))
    np.testing.assert_allclose(layer(placed), expected, atol=1e-6)


@pytest.mark.parametrize("name", ["nanmedian", "sparsemax"])
def test_a_size_has_to_be_known(name, mesh):
    x = dist.distribute_tensor(VALUES, dist.TensorLayout([None, "model"], mesh))
    spec = tf.TensorSpec([4, None])
    call = tf.function(getattr(keras.ops, name), [spec], autograph=False)
    with pytest.raises(ValueError, match=r"Received: x with shape=\(4, None\)"):
        call(x)
