"""Changes of the size, colors and geometry of images."""

import numpy as np
import tensorflow as tf
from tensorflow.python.framework import tensor_util

from keras_tp.backend.tensorflow import placement
from keras_tp.backend.tensorflow.ops import sorting


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


def projective_transform(
    original,
    images,
    transforms,
    output_shape,
    interpolation,
    fill_value=0.0,
    fill_mode="CONSTANT",
    name=None,
):
    """Looks up the pixels that make each pixel, as TensorFlow's kernel does.

    Its gradient is TensorFlow's too, which moves the gradients of the pixels by
    the inverse transforms.
    """
    images = tf.convert_to_tensor(images)
    transforms = tf.unstack(tf.cast(transforms, tf.float32), axis=-1)
    size = _static_size(output_shape)
    if size is None or None in images.shape[1:]:
        raise ValueError(
            "Under a distribution, the sizes of images that are transformed "
            f"have to be known. Received: images.shape={images.shape}, "
            f"output_shape={output_shape}"
        )

    def move(x, transforms, size, fill_value):
        places = _sources(transforms, size)
        places = [
            _inside(place, count, fill_mode)
            for place, count in zip(places, x.shape[1:3])
        ]
        look_up = _nearest if interpolation == "NEAREST" else _bilinear
        return look_up(x, *places, tf.cast(fill_value, x.dtype))

    @placement.custom_gradient
    def moved(x):
        def gradient(dy):
            back = move(dy, _inverse(transforms), x.shape[1:3], 0)
            return tf.cast(back, x.dtype)

        return move(x, transforms, size, fill_value), gradient

    return moved(images)


def _static_size(shape):
    shape = tensor_util.constant_value_as_shape(tf.convert_to_tensor(shape))
    return shape.as_list() if shape.is_fully_defined() else None


def _sources(transforms, size):
    """Returns the row and column that each pixel comes from."""
    a, b, c, d, e, f, g, h = (x[:, None, None] for x in transforms)
    row = sorting.numbers(size[0], tf.float32, [1])
    column = sorting.numbers(size[1], tf.float32)
    distance = g * column + h * row + 1
    # No place inside: TensorFlow fills these pixels.
    is_far = distance == 0
    distance = tf.where(is_far, tf.ones([], tf.float32), distance)
    far = tf.constant(-1e6, tf.float32)
    return (
        tf.where(is_far, far, (d * column + e * row + f) / distance),
        tf.where(is_far, far, (a * column + b * row + c) / distance),
    )


def _inverse(transforms):
    """Returns the inverse transforms: the adjugate, scaled to end with 1."""
    a, b, c, d, e, f, g, h = transforms
    last = a * e - b * d
    return [
        x / last
        for x in (
            *(e - f * h, c * h - b, b * f - c * e),
            *(f * g - d, a - c * g, c * d - a * f),
            *(d * h - e * g, b * g - a * h),
        )
    ]


def _inside(place, count, fill_mode):
    """Returns the places in an image that those outside of it stand for."""
    if fill_mode == "CONSTANT":
        return place
    if fill_mode == "REFLECT":
        # Mirrored at its edges, an image repeats after twice its size.
        period = 2 * count
        below = place + period * tf.floor(-place / period)
        below = tf.where(below < -count, below + period, -below - 1)
        above = place - period * tf.floor(place / period)
        above = tf.where(above < count, above, period - above - 1)
        above = tf.where(place > count - 1, above, place)
        place = tf.where(place < 0, below, above)
    elif fill_mode == "WRAP":
        # The kernel repeats an image after its size, by steps of one less.
        below = count * (tf.floor(-place / max(count - 1, 1)) + 1)
        above = count * tf.floor(place / max(count - 1, 1))
        shift = tf.where(place > count - 1, -above, tf.zeros([], place.dtype))
        place += tf.where(place < 0, below, shift)
    return tf.clip_by_value(place, 0, count - 1)


def _nearest(x, row, column, fill_value):
    # Halves are rounded away from zero.
    row = tf.sign(row) * tf.floor(tf.abs(row) + 0.5)
    column = tf.sign(column) * tf.floor(tf.abs(column) + 0.5)
    return _pixels(x, row, column, fill_value)


def _bilinear(x, row, column, fill_value):
    top, left = tf.floor(row), tf.floor(column)
    right_share = (column - left)[..., None]
    lower_share = (row - top)[..., None]

    lines = []
    for line in (top, top + 1):
        first = tf.cast(_pixels(x, line, left, fill_value), tf.float32)
        second = tf.cast(_pixels(x, line, left + 1, fill_value), tf.float32)
        lines.append((1 - right_share) * first + right_share * second)
    mean = (1 - lower_share) * lines[0] + lower_share * lines[1]
    return tf.cast(mean, x.dtype)


def _pixels(x, row, column, fill_value):
    """Returns the pixels at whole places, `fill_value` outside of `x`."""
    samples, rows, columns, channels = x.shape
    is_inside = (row >= 0) & (row < rows) & (column >= 0) & (column < columns)
    places = tf.cast(
        tf.clip_by_value(row, 0, rows - 1) * columns
        + tf.clip_by_value(column, 0, columns - 1),
        tf.int32,
    )
    shape = [samples, *places.shape[1:]]
    places = tf.reshape(tf.broadcast_to(places, shape), [samples, -1])
    flat = tf.reshape(x, [samples, rows * columns, channels])
    found = tf.reshape(
        tf.gather(flat, places, batch_dims=1), [*shape, channels]
    )
    return tf.where(is_inside[..., None], found, fill_value)
