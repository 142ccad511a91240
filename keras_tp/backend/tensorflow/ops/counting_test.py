import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import ops
from tensorflow.experimental import dtensor

import keras_tp
from keras_tp import distribution as dist
from keras_tp.backend.tensorflow import placement

LIMITS = [-1.0, 0.0, 0.5]
# With numbers that are equal to a limit, and some that are not numbers.
NUMBERS = np.array(
    [[-3, -1, 0.2, 0.5], [np.nan, 2, np.inf, -np.inf]], "float32"
)
IDS = np.array([[0, 3, 3, 7], [5, 9, 0, 0]], "int32")


def encoded(mode, **kwargs):
    return lambda x: keras.layers.CategoryEncoding(8, mode)(x, **kwargs)


def counted(**kwargs):
    return lambda x: tf.math.bincount(x, minlength=8, maxlength=8, **kwargs)


CASES = {
    "digitize": (NUMBERS, lambda x: ops.digitize(x, LIMITS)),
    "digitize_ints": (IDS, lambda x: ops.digitize(x, [0.0, 3.5, 7.0])),
    "left": (NUMBERS[0], lambda x: ops.searchsorted(np.array(LIMITS, "f"), x)),
    "right": (
        NUMBERS[1],
        lambda x: ops.searchsorted(np.array(LIMITS, "f"), x, "right"),
    ),
    "rows_of_sequences": (
        IDS,
        lambda x: tf.searchsorted(np.array([[0, 3, 4], [1, 5, 9]], "int32"), x),
    ),
    "histogram": (
        NUMBERS[0],
        lambda x: ops.histogram(x, 5, range=(-2, 2)),
    ),
    "histogram_of_all": (IDS[1].astype("f"), lambda x: ops.histogram(x, 1)),
    "multi_hot": (IDS % 8, encoded("multi_hot")),
    "count": (IDS % 8, encoded("count")),
    "weighted": (
        IDS % 8,
        encoded("count", count_weights=np.arange(8.0).reshape(2, 4)),
    ),
    "bincount": (IDS, counted()),
    "bincount_of_rows": (IDS, counted(axis=-1, dtype=tf.float32)),
    "bincount_of_some": (IDS, counted(axis=-1, binary_output=True)),
}


@pytest.mark.parametrize(
    "name, dim",
    [(n, dim) for n, (x, _) in CASES.items() for dim in range(x.ndim)],
)
def test_numbers_of_one_device(name, dim):
    value, function = CASES[name]
    expected = keras.tree.flatten(function(tf.constant(value)))
    mesh = dist.DeviceMesh((2,), ["model"], dist.list_devices()[:2])
    mesh = mesh.backend_mesh
    specs = [dtensor.UNSHARDED] * value.ndim
    specs[dim] = "model"
    keras_tp.install()
    placed = placement.place(value, dtensor.Layout(specs, mesh))
    with placement.on_mesh(mesh):
        found = tf.function(function, autograph=False)(placed)
    for a, b in zip(keras.tree.flatten(found), expected, strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(placement.read(a), b)
