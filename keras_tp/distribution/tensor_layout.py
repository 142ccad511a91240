"""The layout of a tensor: which mesh axes split its dims."""

import collections
import math
import types

from keras.src.distribution import distribution_lib as keras_lib

from keras_tp import backend


class TensorLayout(keras_lib.TensorLayout):
    """A layout to apply to a tensor.

    Works as `keras.distribution.TensorLayout`. In addition, an entry may be a
    tuple of mesh axes, which splits that dim over their product. The first axis
    is the major one.

    Example:

    ```python
    mesh = DeviceMesh((2, 2), ["batch", "model"])
    column_parallel = TensorLayout((None, "model"), mesh)
    over_all_devices = TensorLayout((("batch", "model"), None), mesh)
    ```

    Args:
        axes: Tuple with one entry for each dim of the tensor: `None`
            (replicated), the name of a mesh axis, or a tuple of names.
        device_mesh: `DeviceMesh` that has these axes. Defaults to `None`; a
            `LayoutMap` fills in its own.

    Attributes:
        uneven: Boolean. Whether a mesh axis may split a dim of a variable
            that it does not divide, such as a vocabulary of 50257 words over
            4 devices. The last device then holds a smaller part. Defaults to
            `False`: such a layout is an error.
        blocks: Dict of a split dim of a variable to the number of blocks that
            it consists of, one after the other, such as `{1: 3}` for a kernel
            that projects to queries, keys and values. Each device then holds
            its part of every block. Defaults to an empty dict.
        gathered_from: `TensorLayout` that a layer's output has before it gets
            this one. Its gradient gets that layout too: without it, XLA may
            gather the layer's kernel in the backward pass. Defaults to `None`,
            for one that is not known.
        is_scattered: Boolean. Whether the gradient of a gathered output is a
            sum over the devices, of which each needs a part: a reduce-scatter.
            Defaults to `False`.
        sequence_parallel: Boolean. Whether activations around a split kernel,
            of shape `(batch, sequence, features)`, are split along the
            sequence: an input is gathered, and a sum over the devices is
            reduce-scattered. Defaults to `False`.

    Raises:
        ValueError: if a mesh axis is unknown or appears twice.
    """

    uneven = False
    gathered_from = None
    is_scattered = False
    sequence_parallel = False
    blocks = types.MappingProxyType({})

    def __init__(self, axes, device_mesh=None):
        super().__init__(_checked_axes(axes), device_mesh)

    @property
    def backend_layout(self):
        if not hasattr(self, "_backend_layout"):
            lib = backend.distribution_lib
            self._backend_layout = lib._to_backend_layout(self)
        return self._backend_layout

    def stored_shape(self, shape):
        """Returns the shape that devices split into parts of one size.

        A dim that its parts do not divide is padded to a multiple of them. A
        dim of several blocks becomes two: the blocks, and the split dim of
        each. Other layouts keep `shape`.
        """
        shape = tuple(shape)
        if self.device_mesh is None or not (self.uneven or self.blocks):
            return shape
        # Each step asks for every variable.
        key = shape, self.uneven, tuple(self.blocks.items())
        cache = vars(self).setdefault("_stored_shapes", {})
        if key not in cache:
            cache[key] = self._stored_shape(shape)
        return cache[key]

    def _stored_shape(self, shape):
        stored = []
        for dim, (size, axis) in enumerate(zip(shape, self.axes)):
            if dim in self.blocks:
                stored += [self.blocks[dim], size // self.blocks[dim]]
            else:
                count = axis_size(self.device_mesh, axis) if self.uneven else 1
                stored.append(-(-size // count) * count)
        return tuple(stored)

    @property
    def stored_axes(self):
        """The axes of the dims of `stored_shape`."""
        axes = []
        for dim, axis in enumerate(self.axes):
            axes += [None, axis] if dim in self.blocks else [axis]
        return tuple(axes)

    def _validate_axes(self):
        names = [name for axis in self._axes for name in axis_names(axis)]
        repeated = [n for n, k in collections.Counter(names).items() if k > 1]
        if repeated:
            raise ValueError(
                "A mesh axis may split only one dim of a tensor, once. "
                f"Repeated: {repeated}. Received: axes={self._axes}"
            )
        if self._device_mesh is not None:
            known = tuple(self._device_mesh.axis_names)
            unknown = [name for name in names if name not in known]
            if unknown:
                raise ValueError(
                    f"Invalid axis names for Layout: {unknown}. The mesh has "
                    f"the axes {known}. Received: axes={self._axes}"
                )


def as_layout(value, target):
    """Converts a layout from a user to a `TensorLayout`.

    `value` is one already, or a tuple or list with one entry for each dim;
    else, the `ValueError` names the argument `target`.
    """
    if isinstance(value, keras_lib.TensorLayout):
        return value
    return TensorLayout(_checked_axes(value, target))


def _checked_axes(axes, target="axes"):
    if not isinstance(axes, (list, tuple)):
        example = axes if isinstance(axes, str) else "model"
        raise ValueError(
            "A layout is a tuple with one entry for each dim of the tensor: "
            f"`({example!r},)` splits a bias, `(None, {example!r})` the second "
            "dim of a kernel; `(None, None)` leaves a kernel whole. Received: "
            f"{target}={axes!r}"
        )
    axes = tuple(tuple(a) if isinstance(a, list) else a for a in axes)
    for axis in axes:
        names = axis if isinstance(axis, tuple) else (axis,)
        if axis is not None and not all(isinstance(n, str) for n in names):
            raise ValueError(
                "An entry of a layout is None, the name of a mesh axis, or a "
                "tuple of such names: `(None, 'model')`. Received: "
                f"{target}={axes!r}"
            )
    return axes


def axis_names(axis):
    """Returns the mesh axes of one entry of a layout as a tuple of names."""
    if axis is None:
        return ()
    return (axis,) if isinstance(axis, str) else tuple(axis)


def axis_sizes(device_mesh):
    """Returns a dict of each axis of a mesh to its size."""
    return dict(zip(device_mesh.axis_names, device_mesh.shape))


def axis_size(device_mesh, axis):
    """Returns the number of parts that one entry of a layout makes."""
    sizes = axis_sizes(device_mesh)
    return math.prod(sizes[name] for name in axis_names(axis))


def layout_like(axes, layout, dims=None, device_mesh=None):
    """Returns a `TensorLayout` with the options of another layout.

    Args:
        axes: Tuple with one entry for each dim.
        layout: `TensorLayout`, of Keras or keras_tp.
        dims: For each dim, the dim of `layout` that it follows, or `None`.
            Defaults to `None`: the same dims.
        device_mesh: `DeviceMesh`. Defaults to `None`: that of `layout`.
    """
    # Layouts of Keras have no options.
    blocks = getattr(layout, "blocks", {})
    dims = range(len(axes)) if dims is None else dims
    return layout_with(
        axes,
        device_mesh or layout.device_mesh,
        uneven=getattr(layout, "uneven", False),
        blocks={i: blocks[dim] for i, dim in enumerate(dims) if dim in blocks},
    )


def layout_with(axes, device_mesh, uneven=False, blocks=None):
    """Returns a `TensorLayout` with options.

    Args:
        axes: Tuple with one entry for each dim.
        device_mesh: `DeviceMesh`.
        uneven: Boolean. Whether parts may have different sizes. Defaults to
            `False`.
        blocks: Dict of dim to its number of blocks. Dims that are not split
            are left out. Defaults to `None`.
    """
    layout = TensorLayout(axes, device_mesh)
    layout.uneven = uneven
    layout.blocks = {
        dim: count
        for dim, count in (blocks or {}).items()
        if layout.axes[dim] is not None and count > 1
    }
    return layout


def splits_alike(a, b):
    """Returns whether two layouts on one mesh split a tensor alike."""
    blocks = (dict(getattr(layout, "blocks", {})) for layout in (a, b))
    return tuple(a.axes) == tuple(b.axes) and next(blocks) == next(blocks)


def is_uneven(shape, layout):
    """Returns whether a layout splits a shape into parts of different sizes."""
    # Layouts of Keras have no such attribute.
    return getattr(layout, "uneven", False) and any(
        size % axis_size(layout.device_mesh, axis)
        for size, axis in zip(shape, layout.axes)
    )


def part_shape(shape, axes, device_mesh):
    """Returns the shape of the largest part of a tensor on one device."""
    return tuple(
        -(-size // axis_size(device_mesh, axis))
        for size, axis in zip(shape, axes)
    )


def split_largest_dim(axes, shape, axis, device_mesh):
    """Returns `axes` with a mesh axis for the largest whole dim it divides."""
    axes, count = list(axes), axis_size(device_mesh, axis)
    free = [
        dim
        for dim, size in enumerate(shape)
        if axes[dim] is None and size and size % count == 0
    ]
    if free:
        axes[max(free, key=lambda dim: shape[dim])] = axis
    return tuple(axes)


def batch_replicated_if_uneven(layout, shape, batch_axis):
    """Returns a layout with the batch replicated if it does not divide evenly.

    Every device then computes the whole batch. While tracing, an unknown dim
    of `shape` is not an int.
    """
    mesh, axes = layout.device_mesh, layout.axes
    if not shape or not axes or not isinstance(shape[0], int):
        return layout
    if batch_axis in axis_names(axes[0]) and shape[0] % axis_size(
        mesh, axes[0]
    ):
        return TensorLayout((None, *axes[1:]), mesh)
    return layout


def check_layout(layout, shape, what, uneven=False):
    """Raises `ValueError` unless a layout fits a tensor of this shape.

    Args:
        layout: `TensorLayout` with a mesh.
        shape: Tuple of ints. While tracing, an unknown dim is not an int.
        what: String that names the tensor, such as `"variable 'up/kernel'"`.
        uneven: Boolean. Whether a mesh axis may split a dim that it does not
            divide. Defaults to `False`.
    """
    shape = tuple(shape)
    blocks = getattr(layout, "blocks", {})
    uneven = uneven and not blocks
    if len(layout.axes) != len(shape):
        raise ValueError(
            "A layout must have one entry for each dim of its tensor. The "
            f"{what} has rank {len(shape)} (shape {shape}), its layout rank "
            f"{len(layout.axes)}. Received: axes={layout.axes}"
        )
    for dim, (size, axis) in enumerate(zip(shape, layout.axes)):
        count = axis_size(layout.device_mesh, axis)
        if blocks.get(dim, 1) > 1 and size % (blocks[dim] * count):
            raise ValueError(
                f"Dim {dim} of the {what} of shape {shape} cannot consist of "
                f"{blocks[dim]} blocks that are each split over {count} "
                f"devices: {blocks[dim]} x {count} does not divide {size}. "
                f"Received: blocks={dict(blocks)}"
            )
        if isinstance(size, int) and size % count and not uneven:
            divisors = [n for n in range(1, size + 1) if size % n == 0]
            shown = ", ".join(str(n) for n in divisors[:12])
            below = size - size % count
            near = [str(n) for n in (below, below + count) if n]
            raise ValueError(
                f"Dim {dim} of the {what} of shape {shape} has size {size}, "
                f"which mesh axis {axis!r} of size {count} does not divide. "
                f"Axis sizes that divide it: {shown}; sizes of the dim that "
                f"would divide: {', '.join(near)}. Change one of the two, or "
                "use None to replicate the dim. A variable can also have a "
                "smaller part on the last device: set `layout.uneven = True` "
                f"on a `TensorLayout`. Received: axes={layout.axes}"
            )


def format_bytes(size):
    """Returns a number of bytes as text, such as `"1.50 MiB"`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024 or unit == "GiB":
            return f"{size:.2f} {unit}" if unit != "B" else f"{size} B"
        size /= 1024
