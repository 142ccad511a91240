"""Lookups in an embedding table that is split over its rows."""

import math

import tensorflow as tf
from tensorflow.experimental import dtensor

from keras_tp.backend.tensorflow import placement
from keras_tp.backend.tensorflow.ops import sequence

# Elementwise operations; an input may be broadcast.
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
    """Returns over how many devices the rows of a table are split.

    In a table computed from variables, as with LoRA or packed integers, the
    split is known only while rows stay rows. 1 if it is not known, and if the
    batch axis splits the rows, because each device then looks up others.
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
    if not hasattr(x, "op"):
        # A variable, or the tensor of an eager operation.
        return None
    for source, i in _sources(x, dim):
        axis = _axis_of_dim(source, i)
        if axis not in (None, dtensor.UNSHARDED):
            return axis
    return None


def _sources(x, dim):
    """Yields the `(tensor, dim)` that a dim of a computed tensor comes from."""
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
        after = math.prod(x.shape[dim + 1 :])
        for i, same in enumerate(inputs[0].shape):
            # The same size and stride.
            if same == size and math.prod(inputs[0].shape[i + 1 :]) == after:
                yield inputs[0], i


def gather(
    original,
    params,
    indices,
    validate_indices=None,
    axis=None,
    batch_dims=0,
    name=None,
):
    """Looks up rows on the device that holds them, zeros on the others.

    One all-reduce adds the results; DTensor's own `gather` would gather the
    table. This is the vocabulary-parallel embedding of Megatron-LM
    (https://arxiv.org/abs/1909.08053, section 3).
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
    table = tf.convert_to_tensor(params)
    sequence_axis = sequence.lookup_axis(table, (*indices.shape, *row))

    @placement.custom_gradient
    def look_up(table):
        # The new first dim is split over the devices until the sum.
        table = tf.reshape(table, [parts, size, *row])
        first = size * tf.range(parts, dtype=flat.dtype)
        local = flat[None, :] - first[:, None]
        held = tf.logical_and(local >= 0, local < size)
        # An index out of range stays, and is refused as usual.
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

        if sequence_axis is not None:
            # DTensor fuses the sum with the split only if it comes next.
            found = tf.reshape(found, [parts, *indices.shape, *row])
            total = sequence.scattered(sequence.summed(found), sequence_axis)
            return total, lambda dy: gradient(sequence.gathered(dy))
        if found.dtype in (tf.int8, tf.uint8, tf.int16, tf.uint16):
            # Exact, and 32 bits: DTensor sums integers as 64 bits.
            total = tf.reduce_sum(tf.cast(found, tf.float32), 0)
            total = tf.cast(total, found.dtype)
        else:
            total = tf.reduce_sum(found, 0)
        return tf.reshape(total, [*indices.shape, *row]), gradient

    return look_up(table)


def take_along_axis(original, x, indices, axis=None):
    """Looks up one value of each row where it is, and adds zeros of others.

    For example the log probability of each target. DTensor would gather `x`.
    """
    x = tf.convert_to_tensor(x)
    indices = tf.convert_to_tensor(indices)
    rank = len(x.shape)
    size = None if axis is None or not rank else x.shape[axis]
    is_one = size and len(indices.shape) == rank and indices.shape[axis] == 1
    if not is_one or not x.dtype.is_floating:
        return original(x, indices, axis)
    places = tf.range(size, dtype=indices.dtype)
    places = tf.reshape(places, [-1] + [1] * (rank - axis % rank - 1))
    indices = tf.where(indices < 0, indices + size, indices)
    found = tf.where(places == indices, x, tf.zeros([], x.dtype))
    found = tf.reduce_sum(found, axis, keepdims=True)
    is_known = tf.logical_and(indices >= 0, indices < size)
    return tf.where(is_known, found, tf.constant(float("nan"), x.dtype))
