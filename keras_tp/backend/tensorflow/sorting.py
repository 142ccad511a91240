"""What compares all of a dim: sorting, the largest values, the smallest."""

import math

import tensorflow as tf
from tensorflow.experimental import dtensor

from keras_tp.backend.tensorflow import placement


def top_k(original, input, k=1, sorted=True, *args, **kwargs):  # noqa: A002
    """Sorts what is whole on every device, as `tf.sort` does with it too.

    DTensor may hand a part of a row to the operation, which then asks for more
    values than are there, and its gradient writes outside of a part.
    """
    x = tf.convert_to_tensor(input)
    count = tf.get_static_value(k)
    if count is None or not x.shape.is_fully_defined():
        return original(x, k, sorted, *args, **kwargs)
    whole = dtensor.Layout.replicated(placement.current_mesh(), len(x.shape))

    def largest(x):
        x = dtensor.relayout(x, whole)
        return original(x, k, sorted, *args, **kwargs)

    if not x.dtype.is_floating:
        return largest(x)
    *others, size = x.shape
    rows = math.prod(others)

    @placement.custom_gradient
    def with_gradient(x):
        values, indices = largest(x)

        def gradient(dy, unused):
            dy = dtensor.relayout(dy, whole)
            if count < size:
                # A scatter may be handed a part of what it writes into.
                is_of = indices[..., None] == tf.range(size)
                zero = tf.zeros([], dy.dtype)
                return tf.reduce_sum(tf.where(is_of, dy[..., None], zero), -2)
            places = original(-indices, size)[1]
            first = tf.range(rows)[:, None] * size
            places = tf.reshape(places, [rows, size]) + first
            dx = tf.gather(tf.reshape(dy, [-1]), tf.reshape(places, [-1]))
            return tf.reshape(dx, x.shape)

        return (values, indices), gradient

    values, indices = with_gradient(x)
    return type(original(tf.zeros([1]), 1))(values, indices)


def argmin(original, input, axis=None, output_type=tf.int64, name=None):  # noqa: A002
    """The largest of the numbers in the opposite order."""
    x = tf.convert_to_tensor(input)
    if x.dtype.is_floating:
        opposite = -x
    elif x.dtype.is_unsigned:
        opposite = x.dtype.max - x
    else:
        # The smallest integer has no negative.
        opposite = -1 - x
    return tf.argmax(opposite, axis, output_type)


def refused(original, x, *args, **kwargs):
    """Raises; eager, it would end the process."""
    raise NotImplementedError(
        f"Keras computes `{original.__name__}` in a loop over rows, which "
        "DTensor cannot run. Compute it of values that are not distributed, "
        "as `keras.ops.convert_to_numpy` gives them, or use `median` or "
        f"`quantile`. Received: x with shape={tuple(x.shape)}"
    )


_WHOLE = "DTensor sorts a part of what is split"

RULES = [
    ("tensorflow.python.ops.nn_ops", "top_k", top_k, _WHOLE),
    ("tensorflow:math", "top_k", top_k, _WHOLE),
    ("tensorflow:nn", "top_k", top_k, _WHOLE),
    ("tensorflow", "argmin", argmin, "DTensor has no ArgMin"),
    *(
        (
            "keras.src.backend.tensorflow.numpy",
            name,
            refused,
            "DTensor has no layout for the lists of a loop",
        )
        for name in ("nanmedian", "nanquantile")
    ),
]
