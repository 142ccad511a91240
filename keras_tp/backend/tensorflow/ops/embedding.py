"""Lookups in a table that is split over its rows: an embedding's."""

import math

import tensorflow as tf
from tensorflow.experimental import dtensor

from keras_tp.backend.tensorflow import placement

# Computed for each element alone, or for each row.
_ELEMENTWISE = {
    "Add",
    "AddV2",
    "BitwiseAnd",
    "BitwiseXor",
    "Cast",
    "Identity",
    "Mul",
    "RealDiv",
    "RightShift",
    "Sub",
}


def _parts_of_rows(table):
    """Returns how many devices share the rows of a table.

    Args:
        table: Tensor or variable. Of what is computed from variables, as with
            LoRA or from packed integers, only rows that stay rows are known.

    Returns:
        Int, 1 if it is whole, or that is not known; also if the axis that
        splits the rows splits batches too, so that every device has other rows
        to look up.
    """
    axis = _axis_of_dim(table, 0)
    if axis in (None, dtensor.UNSHARDED, placement.batch_axis()):
        return 1
    return placement.current_mesh().dim_size(axis)


def _axis_of_dim(x, dim):
    """Returns the mesh axis that splits a dim; `None` if it is not known."""
    specs = placement.specs_of(x)
    if specs is not None:
        return specs[dim] if len(specs) == len(x.shape) else None
    if not isinstance(x, tf.Tensor) or tf.executing_eagerly():
        return None
    for source, i in _sources(x, dim):
        axis = _axis_of_dim(source, i)
        if axis not in (None, dtensor.UNSHARDED):
            return axis
    return None


def _sources(x, dim):
    """Yields `(tensor, dim)` of what a dim of a computed tensor comes from."""
    op, size = x.op, x.shape[dim]
    inputs = list(op.inputs)
    if op.type in _ELEMENTWISE:
        for source in inputs:
            i = dim - len(x.shape) + len(source.shape)
            if i >= 0 and source.shape[i] == size:
                yield source, i
    elif op.type == "Transpose":
        order = tf.get_static_value(inputs[1])
        if order is not None:
            yield inputs[0], int(order[dim])
    elif op.type == "MatMul" and not any(
        op.get_attr(f"transpose_{name}") for name in "ab"
    ):
        yield inputs[dim], dim
    elif op.type == "ConcatV2":
        if tf.get_static_value(inputs[-1]) != dim:
            yield inputs[0], dim
    elif op.type in ("ExpandDims", "Reshape", "StridedSlice"):
        yield from _same_place(inputs[0], x, dim)


def _same_place(source, x, dim):
    """Yields the dim of `source` that has the same stride from the end."""
    for i, size in enumerate(source.shape):
        if size == x.shape[dim] and (
            math.prod(source.shape[i + 1 :]) == math.prod(x.shape[dim + 1 :])
        ):
            yield source, i


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

    @placement.custom_gradient
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

        if found.dtype in (tf.int8, tf.uint8, tf.int16, tf.uint16):
            # Exact, and 32 bits: DTensor adds up integers as 64.
            total = tf.reduce_sum(tf.cast(found, tf.float32), 0)
            total = tf.cast(total, found.dtype)
        else:
            total = tf.reduce_sum(found, 0)
        return tf.reshape(total, [*indices.shape, *row]), gradient

    return look_up(tf.convert_to_tensor(params))


RULES = [("tensorflow", "gather", gather, "DTensor's gathers the table")]
