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
    "argmin": lambda x: keras.ops.argmin(x, -1),
    "argmin of integers": lambda x: tf.argmin(tf.cast(x * 9, "int32"), 0),
    "argmin of bytes": lambda x: tf.argmin(tf.cast(x * x * 9, "uint8"), 1),
    "shuffle": lambda x: keras.random.shuffle(x, 1, seed=3),
    "softsign": keras.ops.softsign,
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


@pytest.mark.parametrize("name", ["nanmedian", "nanquantile", "sparsemax"])
def test_a_function_is_refused(name, mesh):
    """Eager, or with its gradient, it ended the process or what came next."""
    arguments = (0.3,) if name == "nanquantile" else ()
    x = place(mesh, 1)

    def call(x):
        return getattr(keras.ops, name)(x, *arguments)

    for function in (call, tf.function(call, autograph=False)):
        with pytest.raises(NotImplementedError, match=f"{name}.*Received: x"):
            function(x)
