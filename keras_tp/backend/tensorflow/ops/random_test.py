import numpy as np
import pytest
import tensorflow as tf

from keras_tp import distribution as dist
from keras_tp.backend.tensorflow import placement
from keras_tp.backend.tensorflow.ops import random

SEEDS = [(5, 7), (123456, 0), (-3, 2**31 - 1)]
# One block of four numbers, part of a block, and many.
SHAPES = [(), (4,), (3, 5), (64, 33)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_uniform_is_that_of_tensorflow(shape, seed, dtype):
    expected = tf.random.stateless_uniform(shape, seed, dtype=dtype)
    got = random.uniform(shape, tf.constant(seed), dtype)
    np.testing.assert_array_equal(
        tf.cast(got, "float32"), tf.cast(expected, "float32")
    )


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("seed", SEEDS)
def test_normal_is_that_of_tensorflow(shape, seed):
    expected = tf.random.stateless_normal(shape, seed)
    got = random.normal(shape, tf.constant(seed), tf.float32)
    # Not to the last bit: TensorFlow has a sine of its own there.
    np.testing.assert_allclose(got, expected, atol=5e-6)


@pytest.mark.parametrize("seed", SEEDS)
def test_integers_are_those_of_tensorflow(seed):
    expected = tf.random.stateless_uniform((9, 7), seed, -3, 50, "int32")
    got = random.integers((9, 7), tf.constant(seed), -3, 50)
    np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize(
    "limits", [(0, 3), (-5, 2**31 - 5), (2**40, 2**40 + 7)]
)
@pytest.mark.parametrize("seed", SEEDS)
def test_long_integers_are_those_of_tensorflow(seed, limits):
    expected = tf.random.stateless_uniform((9, 7), seed, *limits, "int64")
    got = random.long_integers((9, 7), tf.constant(seed), *limits)
    np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("shape", [(1, 2), (2, 2), (2, 4)])
@pytest.mark.parametrize("compiled", [False, True])
def test_numbers_do_not_depend_on_the_mesh(shape, compiled):
    expected = tf.random.stateless_uniform((8, 12), (3, 4))
    devices = dist.list_devices()[: shape[0] * shape[1]]
    mesh = dist.DeviceMesh(shape, ["batch", "model"], devices).backend_mesh

    def draw(x):
        # Met by a tensor that is split, the numbers are split too.
        return x + random.uniform((8, 12), tf.constant((3, 4)), "float32")

    layout = dist.TensorLayout(
        ("batch", "model"),
        dist.DeviceMesh(shape, ["batch", "model"], devices),
    ).backend_layout
    x = placement.place(np.zeros((8, 12), "float32"), layout)
    with placement.on_mesh(mesh):
        got = (tf.function(draw) if compiled else draw)(x)
    np.testing.assert_array_equal(placement.read(got), expected)
