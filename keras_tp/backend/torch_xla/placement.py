"""Marks tensors with layouts. XLA splits them, and what comes from them."""

import collections
import warnings

import numpy as np
import torch
import torch_xla
import torch_xla.core.xla_model as xm
from torch_xla.distributed import spmd

_lib = torch_xla._XLAC


class Placement(collections.namedtuple("Placement", ["mesh", "axes"])):
    """A layout in torch_xla's terms.

    Args:
        mesh: `torch_xla.distributed.spmd.Mesh`; `None` for a tensor in the
            host's memory.
        axes: Tuple with `None`, a mesh axis or a tuple of mesh axes for each
            dim.
    """


def to_placement(layout):
    """Returns the `Placement` of a `TensorLayout`."""
    # Layouts of Keras have no such attribute.
    if getattr(layout, "sequence_parallel", False):
        warnings.warn(
            "On torch_xla, activations are not split along the sequence. "
            "Results are correct, but `sequence_parallel=True` saves nothing.",
            stacklevel=2,
        )
    return Placement(layout.device_mesh.backend_mesh, tuple(layout.axes))


def as_placement(layout):
    """Returns the `Placement` of a `TensorLayout` or of a `Placement`."""
    if isinstance(layout, Placement):
        return layout
    return layout.backend_layout


def mark(tensor, placed):
    """Gives a new tensor, which keeps its identity, a sharding.

    Args:
        tensor: XLA tensor without a sharding.
        placed: `Placement`.
    """
    # Also if it is whole on each device: XLA would split results as it likes.
    sharding = placed.mesh.get_op_sharding(placed.axes)
    _lib._xla_mark_sharding(tensor, sharding)
    return tensor


def constrained(tensor, placed):
    """Returns a tensor of a program, and its gradient, with a sharding."""
    if placed.mesh is None:
        return tensor
    return spmd.mark_sharding_with_gradients(tensor, placed.mesh, placed.axes)


def is_split(tensor):
    """Returns whether the sharding of a tensor splits it."""
    return "devices=" in _lib._get_xla_sharding_spec(tensor)


def axes_of(tensor, layout):
    """Returns the mesh axes that split each dim, read from the tensor.

    Args:
        tensor: XLA tensor, or one in the host's memory.
        layout: `TensorLayout`, of which the axes of size 1 are read.
    """
    mesh = layout.device_mesh.backend_mesh
    if mesh is None:
        return (None,) * len(layout.axes)
    found = [_ones(axis, mesh) for axis in layout.axes]
    if is_xla(tensor) and is_split(tensor):
        ids = mesh.get_logical_mesh()
        places = [place for _, place in _places(tensor)]
        for dim, names in enumerate(found):
            starts = np.array(
                [0 if p is Ellipsis else p[dim].start for p in places]
            )[ids]
            for i, name in enumerate(mesh.axis_names):
                if (starts != starts.take([0], i)).any():
                    names.append(name)
    order = list(mesh.axis_names)
    axes = []
    for names in found:
        names.sort(key=order.index)
        axes.append(tuple(names) if len(names) > 1 else (names or [None])[0])
    return tuple(axes)


def _ones(axis, mesh):
    sizes = mesh.shape()
    return [name for name in names_of(axis) if sizes[name] == 1]


def _places(tensor):
    """Returns the replica and the ranges of each device's part of a tensor."""
    # torch_xla cannot tell while a program that makes the tensor runs.
    xm.wait_device_ops()
    (places,) = _lib._get_local_shard_replica_and_indices([tensor])
    return places


def names_of(axis):
    """Returns the list of the mesh axes that split a dim."""
    if axis is None:
        return []
    return list(axis) if isinstance(axis, (list, tuple)) else [axis]


def is_xla(tensor):
    """Returns whether a value is a tensor on XLA's devices."""
    return isinstance(tensor, torch.Tensor) and tensor.device.type == "xla"


def shards(tensor):
    """Returns the shards of a tensor, in the host's memory.

    Returns:
        List with the name of the device, its part, and the range of each dim
        that the part holds, for each device.
    """
    torch_xla.sync(wait=True)
    (parts,) = _lib._get_local_shards([tensor])
    found = []
    for (part, device), (_, indices) in zip(parts, _places(tensor)):
        if indices is Ellipsis:
            ranges = [(0, size) for size in tensor.shape]
        else:
            ranges = [(s.start, s.stop) for s in indices]
        sizes = tuple(slice(0, stop - start) for start, stop in ranges)
        found.append((device.lower(), part[sizes], ranges))
    return found


def load(tensor, parts):
    """Sets the shards of a tensor.

    Args:
        tensor: XLA tensor with a sharding.
        parts: List with a device's name and its part, as `shards` has them.
    """
    devices = [device.upper() for device, _ in parts]
    _lib._load_local_shards(tensor, [part for _, part in parts], devices)
