"""Lookups in a table that is split over its rows: an embedding's."""

import tensorflow as tf
from tensorflow.experimental import dtensor

from keras_tp.backend.tensorflow import placement


def _parts_of_rows(table):
    """Returns how many devices share the rows of a table.

    Args:
        table: Tensor or variable. What is computed from variables, and not
            just read from one, counts as whole.

    Returns:
        Int, 1 if it is whole; also if the axis that splits the rows splits
        batches too, so that every device has other rows to look up.
    """
    specs = placement.specs_of(table)
    if not specs or len(specs) != len(table.shape):
        return 1
    if specs[0] in (dtensor.UNSHARDED, placement.batch_axis()):
        return 1
    return placement.current_mesh().dim_size(specs[0])


def gather(
    original,
    params,
    indices,
    validate_indices=None,
    axis=None,
    batch_dims=0,
    name=None,
):
    """Each device looks up the rows that it holds, and zeros for the others.

    Their sum is all that is communicated; DTensor's own would gather the
    table. (The vocabulary parallel embedding of Megatron-LM,
    https://arxiv.org/abs/1909.08053, section 3.)
    """
    indices = tf.convert_to_tensor(indices)
    parts = 1
    if axis in (None, 0) and batch_dims == 0:
        if indices.shape.is_fully_defined():
            parts = _parts_of_rows(params)
    if parts == 1:
        return original(
            params, indices, validate_indices, axis, batch_dims, name
        )
    if indices.dtype not in (tf.int32, tf.int64):
        indices = tf.cast(indices, tf.int32)
    rows, *row = params.shape
    size = rows // parts
    flat = tf.reshape(indices, [-1])

    @tf.custom_gradient
    def look_up(table):
        # The first dim stands for the device: what follows keeps it.
        table = tf.reshape(table, [parts, size, *row])
        first = size * tf.range(parts, dtype=flat.dtype)
        local = flat[None, :] - first[:, None]
        held = tf.logical_and(local >= 0, local < size)
        # No device holds it: it stays what it is, and is refused as usual.
        nowhere = tf.logical_or(flat < 0, flat >= rows)
        local = tf.where(
            tf.logical_or(held, nowhere[None, :]), local, tf.zeros_like(local)
        )
        found = original(table, local, axis=1, batch_dims=1)
        held = tf.reshape(held, [parts, -1, *(1 for _ in row)])
        found = tf.where(held, found, tf.zeros([], found.dtype))

        def gradient(dy):
            dy = tf.reshape(dy, [-1, *row])
            return tf.math.unsorted_segment_sum(dy, flat, rows)

        found = tf.reduce_sum(found, 0)
        return tf.reshape(found, [*indices.shape, *row]), gradient

    return look_up(tf.convert_to_tensor(params))


RULES = [("tensorflow", "gather", gather, "DTensor's gathers the table")]
