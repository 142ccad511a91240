import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.experimental import dtensor

import keras_tp
from keras_tp import distribution as dist
from keras_tp.backend.tensorflow import placement

METHODS = ["area", "bicubic", "bilinear", "gaussian", "lanczos3", "nearest"]


def images(shape, seed=0):
    return np.random.default_rng(seed).uniform(0, 1, shape).astype("float32")


def colors():
    """Images with pixels whose colors are equal, and black ones."""
    found = images((2, 4, 6, 3))
    found[0, 0, :3, 1] = found[0, 0, :3, 0]
    found[0, 1, :3, 2] = found[0, 1, :3, 1]
    found[1, 0, :3] = found[1, 0, :3, :1]
    found[1, 1, :2] = 0
    return found


def run(function, value, gradients=True):
    def step(x):
        if not gradients:
            return function(x), None
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = function(x)
            weights = tf.reshape(tf.range(y.shape.num_elements()), y.shape)
            loss = tf.reduce_sum(tf.sin(tf.cast(weights, y.dtype)) * y)
        return y, tape.gradient(loss, x)

    return tf.function(step, autograph=False)(value)


def compare(function, value, dim, gradients=True):
    expected = run(function, tf.constant(value), gradients)
    mesh = dist.DeviceMesh((2,), ["model"], dist.list_devices()[:2])
    mesh = mesh.backend_mesh
    specs = [dtensor.UNSHARDED] * value.ndim
    specs[dim] = "model"
    keras_tp.install()
    placed = placement.place(value, dtensor.Layout(specs, mesh))
    with placement.on_mesh(mesh):
        found = run(function, placed, gradients)
    for a, b in zip(found, expected):
        assert (a is None) == (b is None)
        if a is not None:
            assert a.dtype == b.dtype
            np.testing.assert_allclose(
                placement.read(a), b, rtol=1e-4, atol=2e-5
            )


@pytest.mark.parametrize("dim", [0, 1])
def test_hues_have_the_gradients_of_one_device(dim):
    compare(lambda x: tf.image.rgb_to_hsv(x), colors(), dim)


@pytest.mark.parametrize("dim", [0, 1])
def test_colors_of_hues_have_no_gradient(dim):
    compare(lambda x: tf.image.hsv_to_rgb(x), colors(), dim)


def resized(size, method, antialias=False):
    return lambda x: tf.image.resize(x, size, method, antialias=antialias)


@pytest.mark.parametrize("antialias", [False, True])
@pytest.mark.parametrize("method", METHODS)
def test_resized(method, antialias):
    # The area of a pixel has no gradient on one device.
    has_gradient = method != "area"
    value = images((2, 8, 6, 4))
    for size, dim in (((4, 9), 3), ((16, 2), 1), ((8, 3), 0)):
        compare(resized(size, method, antialias), value, dim, has_gradient)


@pytest.mark.parametrize("size", [(4, 9), (8, 6)])
@pytest.mark.parametrize("method", ["bilinear", "nearest"])
def test_resized_integers(method, size):
    value = (images((8, 6, 2)) * 255).astype("uint8")
    compare(resized(size, method), value, 2, False)


TRANSFORMS = np.array(
    [
        [0.9, -0.3, 1.2, 0.2, 1.1, -0.7, 0, 0],
        [1.3, 0.1, -2.4, 0, 0.7, 1.5, 0.02, -0.01],
    ],
    dtype="float32",
)


@pytest.mark.parametrize("dim", [0, 1, 2, 3])
@pytest.mark.parametrize(
    "fill_mode", ["constant", "reflect", "wrap", "nearest"]
)
@pytest.mark.parametrize("interpolation", ["nearest", "bilinear"])
def test_affine_transform(interpolation, fill_mode, dim):
    """Fast transforms that read far outside of the image."""
    moves = TRANSFORMS * [1, 1, 4, 1, 1, 4, 1, 1]
    compare(
        lambda x: keras.ops.image.affine_transform(
            x, moves.astype("float32"), interpolation, fill_mode, 0.3
        ),
        images((2, 6, 8, 4)),
        dim,
    )


def test_affine_transform_of_whole_numbers():
    compare(
        lambda x: keras.ops.image.affine_transform(x, TRANSFORMS[:1]),
        (255 * images((2, 6, 8, 3))).astype("uint8"),
        0,
        gradients=False,
    )
