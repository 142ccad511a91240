"""Shape operations on dims that may be split."""

import math

import numpy as np
import tensorflow as tf
from tensorflow.experimental import dtensor

from keras_tp.backend.tensorflow import placement


def split(original, value, num_or_size_splits, axis=0, num=None, name=None):
    """Splits by slices, because DTensor cannot do it on a split dim."""
    value = tf.convert_to_tensor(value)
    size = value.shape[axis]
    sizes = num_or_size_splits
    if isinstance(sizes, int) and size is not None:
        if size % sizes:
            return original(value, sizes, axis)
        sizes = [size // sizes] * sizes
    sizes = tf.get_static_value(tf.convert_to_tensor(sizes))
    if size is None or sizes is None:
        return original(value, num_or_size_splits, axis, num, name)
    # One size may be -1: the rest.
    rest = size - sum(max(int(s), 0) for s in sizes)
    ends = np.cumsum([rest if s < 0 else int(s) for s in sizes]).tolist()
    return [
        _slice(value, axis, start, stop)
        for start, stop in zip([0, *ends], ends)
    ]


def keras_split(original, x, indices_or_sections, axis=0):
    """Splits with int sizes; Keras would turn the indices into tensors."""
    if isinstance(indices_or_sections, int) or tf.is_tensor(
        indices_or_sections
    ):
        return original(x, indices_or_sections, axis)
    x = tf.convert_to_tensor(x)
    ends = [int(i) for i in indices_or_sections] + [x.shape[axis]]
    sizes = [b - a for a, b in zip([0, *ends], ends)]
    return tf.split(x, sizes, axis)


def unstack(original, value, num=None, axis=0, name="unstack"):
    """Unstacks by slices, because DTensor cannot do it on a split dim."""
    value = tf.convert_to_tensor(value)
    size = value.shape[axis]
    if size is None:
        return original(value, num, axis, name)
    parts = [_slice(value, axis, i, i + 1) for i in range(size)]
    return [tf.squeeze(part, axis) for part in parts]


def stack(original, values, axis=0, name="stack"):
    """Concatenates expanded tensors: DTensor's `stack` gathers every dim.

    Its gradient is sliced: DTensor cannot split along a split dim.
    """
    values = [tf.convert_to_tensor(value) for value in values]
    if not values or not values[0].shape.rank:
        return original(values, axis, name)

    def stacked(*values):
        return tf.concat([tf.expand_dims(x, axis) for x in values], axis)

    @placement.custom_gradient
    def stacked_with_gradient(*values):
        def gradient(dy):
            return tf.unstack(dy, len(values), axis)

        return stacked(*values), gradient

    is_floating = all(value.dtype.is_floating for value in values)
    return (stacked_with_gradient if is_floating else stacked)(*values)


def getitem(original, x, index, *args):
    """Removes dims and adds new ones in separate operations.

    If one operation does both, DTensor gathers every dim or aborts the process:
    it has no layout for a new dim in front.
    """
    items = list(index) if isinstance(index, tuple) else [index]
    kinds = {type(item) for item in items}
    if kinds <= {slice, type(Ellipsis)} or not all(
        issubclass(kind, (int, np.integer, slice, type(None), type(Ellipsis)))
        and kind is not bool
        for kind in kinds
    ):
        return original(x, index, *args)
    x = tf.convert_to_tensor(x)
    known = None if tf.executing_eagerly() else tf.get_static_value(x)
    if known is not None and isinstance(index, (int, np.integer)):
        # A static value, such as a size of another tensor, stays static.
        return tf.constant(known[index], x.dtype)
    if Ellipsis not in items:
        items.append(Ellipsis)
    at = items.index(Ellipsis)
    given = len(items) - 1 - items.count(None)
    items[at : at + 1] = [slice(None)] * (len(x.shape) - given)
    old = [item for item in items if item is not None]
    taken = [i for i, item in enumerate(old) if not isinstance(item, slice)]
    for i in taken:
        # After index -1 the slice ends at `None`, not at 0.
        old[i] = slice(old[i], old[i] + 1 or None)
    x = x[tuple(old)]
    x = tf.squeeze(x, taken) if taken else x
    kept = [item for item in items if item is None or isinstance(item, slice)]
    for i, item in enumerate(kept):
        if item is None:
            x = tf.expand_dims(x, i)
    return x


def squeeze(original, input, axis=None, name=None):
    """Reshapes: DTensor's `squeeze` may keep the shape of the whole tensor."""
    x = tf.convert_to_tensor(input)
    if not x.shape.is_fully_defined():
        return original(x, axis, name)
    if axis is None:
        axis = [dim for dim, size in enumerate(x.shape) if size == 1]
    axes = axis if isinstance(axis, (list, tuple)) else [axis]
    axes = {int(dim) % len(x.shape) for dim in axes}
    if any(x.shape[dim] != 1 for dim in axes):
        return original(x, axis, name)
    return tf.reshape(
        x, [size for dim, size in enumerate(x.shape) if dim not in axes]
    )


def transpose(original, a, perm=None, conjugate=False, name="transpose"):
    """Replicates a samples-by-samples matrix to transpose it.

    DTensor wants the first dim split over the batch axis before and after the
    transpose, and cannot move the split.
    """
    if not _is_of_samples(a):
        return original(a, perm, conjugate, name)
    layout = dtensor.Layout.replicated(placement.current_mesh(), 2)

    def transposed(x):
        x = original(dtensor.relayout(x, layout), perm, conjugate, name)
        return dtensor.relayout(x, layout)

    @placement.custom_gradient
    def transposed_with_gradient(x):
        # A transpose of two dims is its own inverse, so also its gradient.
        return transposed(x), transposed

    return transposed_with_gradient(tf.convert_to_tensor(a))


def steps_first(x):
    """Swaps samples and steps, the first two dims, as recurrent layers do.

    The result is put together from its steps: a transpose of DTensor can
    neither split nor gather a dim, as the weights and the gradients of a cell
    may need.
    """
    return _swapped(x, _to_steps_first, _to_samples_first)


def samples_first(x):
    """Swaps steps and samples back, see `steps_first`."""
    return _swapped(x, _to_samples_first, _to_steps_first)


def _swapped(x, swap, swap_back):
    x = tf.convert_to_tensor(x)
    if None in x.shape[:2] or not x.dtype.is_floating:
        return tf.transpose(x, [1, 0, *range(2, len(x.shape))])

    @placement.custom_gradient
    def swapped(x):
        return swap(x), swap_back

    return swapped(x)


def _to_steps_first(x):
    steps = [tf.expand_dims(x[:, i], 0) for i in range(x.shape[1])]
    return tf.concat(steps, 0)


def _to_samples_first(x):
    return tf.concat([tf.expand_dims(step, 1) for step in tf.unstack(x)], 1)


def _is_of_samples(x):
    return (
        placement.batch_axis() is not None
        and isinstance(x, tf.Tensor)
        and len(x.shape) == 2
        and x.shape[0] is not None
        and x.shape[0] == x.shape[1]
        and placement.specs_of(x) is None
    )


def reduce_mean(original, input_tensor, axis=None, keepdims=False, name=None):
    """Computes the mean of an image; a product broadcasts its gradient.

    DTensor repeats a replicated gradient as if it were split.
    """
    x = tf.convert_to_tensor(input_tensor)
    shape = x.shape
    axes = tf.get_static_value(axis)
    if (
        axes is None
        or len(shape) < 4
        or not shape.is_fully_defined()
        or not x.dtype.is_floating
    ):
        return original(x, axis, keepdims, name)
    axes = [int(dim) % len(shape) for dim in np.ravel(axes)]
    kept = [1 if dim in axes else size for dim, size in enumerate(shape)]
    count = math.prod(shape[dim] for dim in axes)

    @placement.custom_gradient
    def mean(x):
        def gradient(dy):
            return tf.reshape(dy / count, kept) * tf.ones(shape, dy.dtype)

        return original(x, axis, keepdims, name), gradient

    return mean(x)


def pad(
    original, tensor, paddings, mode="CONSTANT", constant_values=0, name=None
):
    """Pads by concatenation, because DTensor cannot pad a split dim.

    A mirrored dim is gathered.
    """
    x = tf.convert_to_tensor(tensor)
    widths = tf.get_static_value(tf.convert_to_tensor(paddings))
    if widths is None or not x.shape.is_fully_defined():
        return original(x, paddings, mode, constant_values, name)
    if mode.upper() != "CONSTANT":
        for dim, around in enumerate(widths.tolist()):
            if any(around):
                places = np.arange(x.shape[dim])
                places = np.pad(places, around, mode.lower())
                x = tf.gather(x, places, axis=dim)
        return x
    value = tf.cast(constant_values, x.dtype)
    for dim, (before, after) in enumerate(widths.tolist()):
        parts = [x]
        if before:
            parts.insert(0, tf.fill(_resized(x, dim, before), value))
        if after:
            parts.append(tf.fill(_resized(x, dim, after), value))
        x = tf.concat(parts, dim) if before or after else x
    return x


def reverse(original, tensor, axis, name=None):
    """Gathers along a dim with indices from the last to the first."""
    tensor = tf.convert_to_tensor(tensor)
    axes = tf.get_static_value(tf.convert_to_tensor(axis))
    for dim in axes.reshape([-1]):
        size = tensor.shape[int(dim)]
        if size is None:
            return original(tensor, axis, name)
        tensor = tf.gather(tensor, tf.range(size - 1, -1, -1), axis=int(dim))
    return tensor


def roll(original, input, shift, axis, name=None):
    """Concatenates the end and the beginning of a dim."""
    input = tf.convert_to_tensor(input)
    shifts = tf.get_static_value(tf.convert_to_tensor(shift))
    axes = tf.get_static_value(tf.convert_to_tensor(axis))
    if shifts is None or axes is None:
        return original(input, shift, axis, name)
    for by, dim in zip(shifts.reshape([-1]), axes.reshape([-1])):
        size = input.shape[int(dim)]
        by = int(by) % size
        if by:
            parts = tf.split(input, [size - by, by], int(dim))
            input = tf.concat(parts[::-1], int(dim))
    return input


def slice_update(original, inputs, start_indices, updates):
    """Writes into a KV cache by comparing positions.

    The dims that are written whole, such as the heads, may be split. Each
    device has all positions of the other dims.
    """
    inputs = tf.convert_to_tensor(inputs)
    updates = tf.convert_to_tensor(updates)
    if not (
        inputs.shape.is_fully_defined() and updates.shape.is_fully_defined()
    ):
        return original(inputs, start_indices, updates)
    starts = start_indices
    if tf.is_tensor(starts):
        starts = tf.unstack(starts)
    written = None
    for dim, start in enumerate(starts):
        size, part = inputs.shape[dim], updates.shape[dim]
        if part == size:
            continue
        # Like XLA, move an update back that would reach over the end.
        start = tf.clip_by_value(tf.cast(start, tf.int32), 0, size - part)
        position = tf.range(size) - start
        if part > 1:
            nearest = tf.clip_by_value(position, 0, part - 1)
            updates = tf.gather(updates, nearest, axis=dim)
        here = tf.logical_and(position >= 0, position < part)
        after = len(inputs.shape) - dim - 1
        here = tf.reshape(here, [size] + [1] * after)
        written = here if written is None else tf.logical_and(written, here)
    return updates if written is None else tf.where(written, updates, inputs)


def _resized(x, dim, size):
    return [*x.shape[:dim], size, *x.shape[dim + 1 :]]


def _slice(x, axis, start, stop):
    index = [slice(None)] * len(x.shape)
    index[axis] = slice(start, stop)
    return x[tuple(index)]
