"""Changes of an image's size and colors."""

import numpy as np
import tensorflow as tf

from keras_tp.backend.tensorflow import placement


def rgb_to_hsv(original, images, name=None):
    """Computes the formula of TensorFlow's kernel."""
    red, green, blue = tf.unstack(tf.convert_to_tensor(images), axis=-1)
    # Of equal values, TensorFlow's gradient takes the same ones.
    is_red = tf.logical_and(red >= green, red >= blue)
    value = tf.where(is_red, red, tf.where(green >= blue, green, blue))
    least = tf.where(
        tf.logical_and(red < green, red < blue),
        red,
        tf.where(green < blue, green, blue),
    )
    distance = value - least
    is_gray = distance <= 0
    one = tf.ones([], value.dtype)
    sixth = one / (6 * tf.where(is_gray, one, distance))
    hue = tf.where(
        is_red,
        sixth * (green - blue),
        tf.where(
            green >= blue,
            sixth * (blue - red) + 2 / 6,
            sixth * (red - green) + 4 / 6,
        ),
    )
    hue = tf.where(is_gray, tf.zeros([], hue.dtype), hue)
    hue = tf.where(hue < 0, hue + 1, hue)
    is_positive = value > 0
    saturation = distance / tf.where(is_positive, value, one)
    saturation = tf.where(is_positive, saturation, tf.zeros([], value.dtype))
    return tf.stack([hue, saturation, value], -1)


def hsv_to_rgb(original, images, name=None):
    """Computes the formula of TensorFlow's kernel, which has no gradient."""
    images = tf.stop_gradient(tf.convert_to_tensor(images))
    hue, saturation, value = tf.unstack(images, axis=-1)
    sixths = hue * 6
    colors = [
        tf.abs(sixths - 3) - 1,
        2 - tf.abs(sixths - 2),
        2 - tf.abs(sixths - 4),
    ]
    colors = [
        (1 - saturation + saturation * tf.clip_by_value(x, 0, 1)) * value
        for x in colors
    ]
    return tf.stack(colors, -1)


def resize(
    original,
    images,
    size,
    method="bilinear",
    preserve_aspect_ratio=False,
    antialias=False,
    name=None,
):
    """Adds up weighted rows, then columns, of which each pixel is made.

    DTensor can resize images only where the dim of samples is split, or none.
    """
    x = tf.convert_to_tensor(images)
    sizes = tf.get_static_value(tf.convert_to_tensor(size))
    if (
        preserve_aspect_ratio
        or sizes is None
        or len(x.shape) not in (3, 4)
        or None in x.shape[-3:-1]
    ):
        return original(
            images, size, method, preserve_aspect_ratio, antialias, name
        )
    if method != tf.image.ResizeMethod.NEAREST_NEIGHBOR:
        x = tf.cast(x, tf.float32)
    if tuple(x.shape[-3:-1]) == tuple(sizes):
        return x
    for dim, count in zip((len(x.shape) - 3, len(x.shape) - 2), sizes):
        weights = _weights(original, x.shape[dim], count, method, antialias)
        x = _combined(x, dim, weights)
    return x


def _weights(original, before, after, method, antialias):
    """Returns how much each pixel of a line adds to each resized pixel."""
    # One line for each channel, with a one at another place.
    lines = np.eye(before, dtype="float32")[None, :, None, :]
    with placement.off_mesh():
        lines = original(lines, (after, 1), method, False, antialias)
        return lines.numpy()[0, :, 0, :]


def _combined(x, dim, weights):
    """Multiplies a dim by a matrix that has few numbers in a row."""
    if np.array_equal(weights, np.eye(x.shape[dim])):
        return x
    order = np.argsort(weights == 0, axis=1, kind="stable")
    count = np.max(np.count_nonzero(weights, axis=1))
    if np.all(weights[weights != 0] == 1) and count == 1:
        return tf.gather(x, order[:, 0], axis=dim)
    after = len(x.shape) - dim - 1
    total = None
    for indices in order[:, :count].T:
        weight = np.take_along_axis(weights, indices[:, None], 1)
        weight = weight.reshape([-1, *[1] * after])
        part = tf.gather(x, indices, axis=dim) * placement.replicated(weight)
        total = part if total is None else total + part
    return total
