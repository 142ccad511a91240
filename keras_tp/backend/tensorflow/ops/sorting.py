"""The largest values of a dim and their places, and functions that sort it.

The logits of a split vocabulary are not gathered where a device can find its
own candidates first: DTensor would gather what `argmax`, `top_k` and
`in_top_k` get.
"""

import numpy as np
import tensorflow as tf
from keras.src import backend as keras_backend

from keras_tp.backend.tensorflow import placement


def argmax(original, input, axis=None, output_type=tf.int64, name=None):
    """Returns the smallest of the indices that have the largest value.

    Two tensors of the shape of the result are all-reduced.
    """
    x = tf.convert_to_tensor(input)
    axis = tf.get_static_value(0 if axis is None else axis)
    size = None if axis is None or not len(x.shape) else x.shape[int(axis)]
    can_reduce = x.dtype.is_floating or x.dtype in (tf.int32, tf.int64)
    if not size or not can_reduce:
        return original(x, axis, output_type, name)
    axis = int(axis) % len(x.shape)
    largest = tf.reduce_max(x, axis, keepdims=True)
    after = [1] * (len(x.shape) - axis - 1)
    # NaN is not less than any value, so that its index is found.
    places = tf.where(x < largest, size, numbers(size, tf.int32, after))
    return tf.cast(tf.reduce_min(places, axis), output_type)


def argmin(original, input, axis=None, output_type=tf.int64, name=None):
    """Computes `argmax` of values whose order is inverted."""
    x = tf.convert_to_tensor(input)
    if x.dtype.is_floating:
        opposite = -x
    elif x.dtype.is_bool:
        opposite = tf.logical_not(x)
    elif x.dtype.is_unsigned:
        opposite = x.dtype.max - x
    else:
        # Negation would overflow for the smallest integer.
        opposite = -1 - x
    return tf.argmax(opposite, axis, output_type)


def top_k(original, input, k=1, sorted=True, index_type=tf.int32, name=None):
    """Finds the largest values of each device's part, and then of all.

    The gradient of each value is added where the value comes from;
    TensorFlow's gradient would write outside of a device's part. Values are
    sorted in any case, so that the order is the same on every mesh.
    """
    x = tf.convert_to_tensor(input)
    if not x.dtype.is_floating or x.shape[-1] is None:
        return original(x, k, sorted, index_type, name)
    result_type = []

    def largest(x, k):
        result = original(x, k, True, index_type, name)
        result_type.append(type(result))
        return result

    @placement.custom_gradient
    def found(x):
        result = _from_parts(largest, x, k)
        places = numbers(x.shape[-1], result.indices.dtype)

        def gradient(dy, unused):
            is_source = result.indices[..., None] == places
            zero = tf.zeros([], dy.dtype)
            return tf.reduce_sum(tf.where(is_source, dy[..., None], zero), -2)

        return tuple(result), gradient

    values = found(x)
    return result_type[0](*values)


def _from_parts(largest, x, k):
    """Finds the candidates of each device's part, then the best of them.

    Equal values keep their order in both steps, so the result is equal to that
    of a `top_k` of all values.

    Args:
        largest: Function of a tensor and `k`; returns values and indices.
        x: Tensor. Its last dim may be split.
        k: Int.
    """
    mesh, batch = placement.current_mesh(), placement.batch_axis()
    parts = 1
    for axis in () if mesh is None else mesh.dim_names:
        parts *= 1 if axis == batch else mesh.dim_size(axis)
    k = tf.get_static_value(k)
    *rows, size = x.shape
    if None in (k, *rows) or size % parts or not k * parts * 2 <= size:
        return largest(x, k)
    own = size // parts
    found = largest(tf.reshape(x, [*rows, parts, own]), k)
    first = numbers(parts, found.indices.dtype, [1]) * own
    joined = [*rows, parts * k]
    places = tf.reshape(found.indices + first, joined)
    best = largest(tf.reshape(found.values, joined), k)
    chosen = best.indices[..., None] == numbers(parts * k, best.indices.dtype)
    places = tf.where(chosen, places[..., None, :], 0)
    return type(best)(best.values, tf.reduce_sum(places, -1))


def in_top_k(original, targets, predictions, k, name=None):
    """Counts the classes whose prediction is larger than the target's.

    As in TensorFlow, the result is `False` for a row with a prediction that is
    not finite, and for a target that is not a class.
    """
    x = tf.convert_to_tensor(predictions)
    targets = tf.convert_to_tensor(targets)
    if x.shape[-1] is None:
        return original(targets, x, k, name)
    targets = targets[:, None]
    classes = numbers(x.shape[-1], targets.dtype)
    zero = tf.zeros([], x.dtype)
    of_target = tf.where(classes == targets, x, zero)
    of_target = tf.reduce_sum(of_target, -1, keepdims=True)
    k = tf.cast(k, tf.int32)
    is_larger = tf.cast(x > of_target, tf.int32)
    larger = tf.where(tf.math.is_finite(x), is_larger, k)
    is_class = (targets >= 0) & (targets < x.shape[-1])
    return (tf.reduce_sum(larger, -1) < k) & is_class[:, 0]


def top_k_of_sort(original, input, k=1, **kwargs):
    """Sorts with the gradient of `top_k`, if rows are short.

    That gradient compares each number of a row with each other one.
    """
    size = input.shape[-1]
    if size is None or size > _LONGEST_COMPARED:
        return original(input, k, **kwargs)
    return top_k(original, input, k, **kwargs)


_LONGEST_COMPARED = 512


def sparsemax(original, x, axis=-1):
    """Computes Keras's formula from ranks instead of sorted values.

    DTensor gathers the sorted dim, and no other. The gradient of a sort would
    write outside of a device's part; ranks have no gradient.
    """
    x = tf.convert_to_tensor(x)
    axis %= len(x.shape)
    _check_size(x.shape[axis], x.shape, "sparsemax")
    order = tf.argsort(x, axis, "DESCENDING", stable=True)
    place = tf.argsort(order, axis, stable=True)
    place = gathered(place, axis)
    place = tf.cast(place, x.dtype)
    ordered = tf.sort(tf.stop_gradient(x), axis, "DESCENDING")
    after = len(x.shape) - axis - 1
    counts = numbers(x.shape[axis], x.dtype, [1] * after) + 1
    support = ordered - (tf.cumsum(ordered, axis) - 1) / counts > 0
    count = tf.reduce_sum(tf.cast(support, x.dtype), axis, keepdims=True)
    # Keras adds up the running sums of the `count` largest values. The largest
    # value is in all of these sums, the smallest of them in one.
    total = tf.reduce_sum(tf.maximum(count - place, 0) * x, axis, keepdims=True)
    return tf.maximum(x - (total - 1) / count, 0)


def gathered(x, axis):
    """Gathers a dim of `x`, so that later operations may split it.

    Otherwise DTensor asks the operation before for a split output, which a sort
    and a concatenation cannot give. It does not ask a gather for one.
    """
    return tf.gather(x, numbers(x.shape[axis], tf.int32), axis=axis)


def _check_size(size, shape, name):
    if size is None:
        raise ValueError(
            f"Under a distribution, `{name}` needs a shape that is known when "
            f"the step is traced. Received: x with shape={tuple(shape)}"
        )


def numbers(size, dtype, ones=()):
    """Returns 0 to `size - 1`, replicated, with dims of size 1 appended."""
    found = np.arange(size, dtype=tf.as_dtype(dtype).as_numpy_dtype)
    return placement.replicated(found.reshape([size, *ones]))


def nanquantile(original, x, q, axis=None, method="linear", keepdims=False):
    """Takes the values at two ranks of each row, without a loop over rows.

    Finds them by their indices, because the gradient of a sort would write
    outside of a device's part.
    """
    x = tf.convert_to_tensor(x)
    x = tf.cast(x, keras_backend.result_type(x.dtype, float))
    q = placement.replicated(tf.convert_to_tensor(q, keras_backend.floatx()))
    rank = len(x.shape)
    _check_size(x.shape.num_elements(), x.shape, "nanquantile")
    axes = range(rank) if axis is None else np.ravel(axis)
    axes = sorted(int(dim) % rank for dim in axes)
    others = [dim for dim in range(rank) if dim not in axes]
    rows = [x.shape[dim] for dim in others]
    # The last dim holds the numbers of a row, the one before it quantiles.
    y = tf.transpose(x, [*others, *axes])
    y = tf.reshape(y, [*rows, 1, -1])
    is_nan = tf.math.is_nan(y)
    infinite = tf.constant(float("inf"), y.dtype)
    order = tf.argsort(tf.where(is_nan, infinite, y), -1)
    count = tf.reduce_sum(tf.cast(tf.logical_not(is_nan), tf.int32), -1)
    last = tf.maximum(count - 1, 0)
    wanted = tf.reshape(tf.cast(q, tf.float64), [-1])
    exact = tf.cast(last, tf.float64) * wanted
    places = numbers(y.shape[-1], tf.int32)

    def value_at(position):
        position = tf.cast(position, tf.int32)
        at = tf.where(places == position[..., None], order, 0)
        found = places == tf.reduce_sum(at, -1)[..., None]
        return tf.reduce_sum(tf.where(found, y, 0), -1)

    low, high = tf.math.floor(exact), tf.math.ceil(exact)
    if method == "linear":
        # Like Keras: between two neighbours, even if the rank is exact.
        low = tf.maximum(high - 1, 0)
        high = tf.minimum(low + 1, tf.cast(last, tf.float64))
        fraction = tf.cast(high - exact, y.dtype)
        result = value_at(high) * (1 - fraction) + value_at(low) * fraction
    elif method == "midpoint":
        result = (value_at(low) + value_at(high)) / 2
    else:
        nearest = tf.round(exact)
        chosen = {"lower": low, "higher": high, "nearest": nearest}
        result = value_at(chosen[method])
    result = tf.where(count > 0, result, tf.constant(float("nan"), y.dtype))
    # Move the quantiles to the front.
    result = tf.transpose(result, [len(rows), *range(len(rows))])
    if keepdims:
        rows = [1 if dim in axes else x.shape[dim] for dim in range(rank)]
    return tf.reshape(result, [*q.shape, *rows])
