"""Functions that count: places in sorted numbers, and numbers of each size."""

import numpy as np
import tensorflow as tf

from keras_tp.backend.tensorflow import placement
from keras_tp.backend.tensorflow.ops import sorting


def searchsorted(
    original,
    sorted_sequence,
    values,
    side="left",
    out_type=tf.int32,
    name=None,
):
    """Counts the numbers of a sequence that come before each value.

    Compares each value with each number; both may be split.
    """
    sequence = tf.convert_to_tensor(sorted_sequence)
    values = tf.convert_to_tensor(values)
    sequence, values = sequence[..., None, :], values[..., None]
    if side == "right":
        before = _is_reached(values, sequence)
    else:
        before = sequence < values
    return tf.reduce_sum(tf.cast(before, out_type), -1)


def _is_reached(x, limits):
    """Returns whether no limit is above `x`; none is above NaN.

    TensorFlow would make `>=` of a `<` that is negated.
    """
    found = x >= limits
    is_floating = x.dtype.is_floating
    return tf.logical_or(found, tf.math.is_nan(x)) if is_floating else found


def digitize(original, x, bins):
    """Counts the limits of bins that are not above each value."""
    if isinstance(x, (tf.RaggedTensor, tf.SparseTensor)):
        return original(x, bins)
    x = tf.convert_to_tensor(x)
    dtype = x.dtype if x.dtype == tf.float64 else tf.float32
    bins = np.array([float(limit) for limit in bins], dtype.as_numpy_dtype)
    x = tf.expand_dims(tf.cast(x, dtype), -1)
    reached = _is_reached(x, placement.replicated(bins))
    return tf.reduce_sum(tf.cast(reached, tf.int32), -1)


def histogram(original, x, bins=10, range=None):
    """Compares the bin of each value with all; no shape depends on values."""
    x = tf.convert_to_tensor(x)
    lowest, highest = range or (tf.reduce_min(x), tf.reduce_max(x))
    edges = tf.cast(tf.linspace(lowest, highest, bins + 1), x.dtype)
    places = tf.searchsorted(edges[1:-1], x, side="right")
    found = places[..., None] == sorting.numbers(bins, places.dtype)
    is_inside = tf.logical_and(x >= lowest, x <= highest)
    found = tf.logical_and(found, is_inside[..., None])
    counts = tf.reduce_sum(tf.cast(found, x.dtype), tf.range(len(x.shape)))
    return counts, edges


def bincount(
    original,
    arr,
    weights=None,
    minlength=None,
    maxlength=None,
    dtype=tf.int32,
    name=None,
    axis=None,
    binary_output=False,
):
    """Compares each number with each bin, if it is known how many there are.

    That is so with a `maxlength` that is also the `minlength`.
    """
    count = tf.get_static_value(minlength)
    if (
        count is None
        or count != tf.get_static_value(maxlength)
        or isinstance(arr, (tf.RaggedTensor, tf.SparseTensor))
        or axis not in (None, 0, -1)
        or (binary_output and weights is not None)
    ):
        return original(
            arr,
            weights,
            minlength,
            maxlength,
            dtype,
            name,
            axis,
            binary_output,
        )
    x = tf.convert_to_tensor(arr)
    x = x if x.dtype.is_integer else tf.cast(x, tf.int32)
    found = x[..., None] == sorting.numbers(int(count), x.dtype)
    axes = [-2] if axis == -1 else list(range(len(x.shape)))
    if binary_output:
        return tf.cast(tf.reduce_any(found, axes), dtype)
    if weights is None:
        return tf.reduce_sum(tf.cast(found, dtype), axes)
    weights = tf.convert_to_tensor(weights)
    zero = tf.zeros([], weights.dtype)
    return tf.reduce_sum(tf.where(found, weights[..., None], zero), axes)
