"""What a loop that adds tokens is made of, on a mesh."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import ops
from tensorflow.experimental import dtensor

import keras_tp
from keras_tp import distribution as dist
from keras_tp.backend.tensorflow import placement

CACHE = np.random.default_rng(0).normal(size=(3, 6, 4, 2)).astype("float32")


def on_devices(count, function, *values):
    """Runs a function on values whose last dim but one is split."""
    mesh = dist.DeviceMesh((count,), ["model"], dist.list_devices()[:count])
    mesh = mesh.backend_mesh
    keras_tp.install()
    placed = []
    for value in values:
        specs = [dtensor.UNSHARDED] * value.ndim
        if value.ndim > 1:
            specs[-2] = "model"
        placed.append(placement.place(value, dtensor.Layout(specs, mesh)))
    with placement.on_mesh(mesh):
        found = tf.function(function, autograph=False)(*placed)
    return found


@pytest.mark.parametrize("start", [0, 2, 5, 9])
@pytest.mark.parametrize("length", [1, 3, 6])
@pytest.mark.parametrize("rows", [2, 3])
def test_a_cache_is_written_where_it_is(start, length, rows):
    """As XLA writes it, which moves back what reaches over the end."""
    update = -CACHE[:rows, :length]

    def write(cache, update, start):
        return ops.slice_update(cache, [0, start, 0, 0], update)

    expected = write(tf.constant(CACHE), update, tf.constant(start))
    found = on_devices(2, write, CACHE, update, np.array(start, "int32"))
    assert dtensor.fetch_layout(found).sharding_specs[-2] == "model"
    np.testing.assert_array_equal(placement.read(found), expected)


def test_writing_across_the_border_of_two_devices():
    update = np.ones((1, 1, 2, 2), "float32")

    def write(cache):
        return ops.slice_update(cache, np.array([1, 3, 1, 0]), update)

    expected = write(tf.constant(CACHE))
    found = on_devices(2, write, CACHE)
    np.testing.assert_array_equal(placement.read(found), expected)


def test_tokens_are_drawn_as_often_as_they_are_likely():
    logits = np.log([[1.0, 2.0, 5.0], [4.0, 4.0, 1e-9]]).astype("float32")

    def draw(logits):
        return keras.random.categorical(logits, 20000, seed=3)

    found = placement.read(on_devices(1, draw, logits))
    assert found.shape == (2, 20000)
    counts = np.stack([np.bincount(row, minlength=3) for row in found])
    np.testing.assert_allclose(
        counts / 20000, [[0.125, 0.25, 0.625], [0.5, 0.5, 0.0]], atol=0.01
    )
    again = placement.read(on_devices(2, draw, logits))
    np.testing.assert_array_equal(again, found)
