"""Converts Keras's layouts to DTensor placements.

The torch mesh leaves out axes of size 1, because they split nothing. On a mesh
of one device every tensor is plain.
"""

import collections
import math

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh as TorchMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Replicate
from torch.distributed.tensor import Shard
from torch.distributed.tensor._utils import (
    compute_local_shape_and_global_offset,
)

# A dim of several blocks, of which each shard holds its part of every block.
from torch.distributed.tensor.placement_types import _StridedShard as InBlocks

from keras_tp.backend import host_memory
from keras_tp.backend.torch import launcher
from keras_tp.backend.torch import processes

# One torch mesh for each distinct mesh, because each makes process groups.
_meshes = {}


class Placement(collections.namedtuple("Placement", ["mesh", "placements"])):
    """A layout in torch's terms: a mesh and DTensor placements.

    Args:
        mesh: `torch.distributed.device_mesh.DeviceMesh`; `None` for one
            device, where tensors are plain.
        placements: Tuple with a DTensor placement for each mesh dim.
    """

    @property
    def is_split(self):
        """Whether a dim of the tensor is split."""
        return any(map(is_shard, self.placements))


def is_shard(placed):
    """Returns whether a DTensor placement splits a dim, in blocks or not.

    `placed.is_shard()` is `False` for a dim in blocks.
    """
    return placed.is_shard() or isinstance(placed, InBlocks)


def to_torch_mesh(device_mesh):
    """Returns the torch mesh of a Keras mesh; `None` for one device.

    A collective at the first call: every process calls it, in the same order.

    Raises:
        ValueError: unless the mesh holds the device of every process.
    """
    devices = [str(device) for device in device_mesh.devices.flatten()]
    if len(devices) == 1:
        return None
    indices = [int(name.split(":")[-1]) for name in devices]
    world = processes.world_size()
    if len(indices) > world:
        raise ValueError(
            f"The mesh has {len(devices)} devices and this run has {world} "
            "process(es); torch runs one process per device. "
            f"{launcher.how_to_launch(len(devices))} Received: "
            f"device_mesh={device_mesh}"
        )
    if sorted(indices) != list(range(world)):
        raise ValueError(
            "torch runs one process per device, and every process takes part "
            f"in every step. A mesh of several devices must hold all {world} "
            "devices; a mesh of one device keeps a copy in each process. "
            f"{launcher.how_to_launch(len(devices))} Received: "
            f"devices={devices}"
        )
    processes.start()
    axes = [axis for axis, size in _sizes(device_mesh).items() if size > 1]
    shape = [size for size in device_mesh.shape if size > 1]
    kind = "cpu" if devices[0].startswith("cpu") else "cuda"
    key = (id(dist.group.WORLD), kind, tuple(axes), tuple(shape), str(indices))
    if key not in _meshes:
        processes.same_everywhere(
            "meshes",
            (kind, axes, shape, indices),
            "Make the same `DeviceMesh` in every process. This one holds "
            f"{device_mesh}.",
        )
        _meshes[key] = TorchMesh(
            kind,
            torch.tensor(indices).reshape(shape),
            mesh_dim_names=tuple(axes),
        )
    return _meshes[key]


def to_placement(layout):
    """Returns the `Placement` of a `TensorLayout`."""
    mesh = layout.device_mesh.backend_mesh
    if mesh is None:
        return Placement(None, ())
    placements = [Replicate()] * mesh.ndim
    # Layouts of Keras have no such attributes.
    if getattr(layout, "sequence_parallel", False):
        # The gradients of norms are partial sums over all axes. DTensor has
        # one all-reduce for them if the mesh has such a dim.
        mesh._flatten()
    blocks = getattr(layout, "blocks", {})
    for dim, axis in enumerate(layout.axes):
        for name in _names(axis):
            # A dim over several axes is split in the order of the mesh.
            if name in mesh.mesh_dim_names:
                placements[mesh.mesh_dim_names.index(name)] = (
                    InBlocks(dim, split_factor=blocks[dim])
                    if dim in blocks
                    else Shard(dim)
                )
    return Placement(mesh, tuple(placements))


def as_placement(layout):
    """Returns the `Placement` of a `TensorLayout` or of a `Placement`."""
    if isinstance(layout, Placement):
        return layout
    return layout.backend_layout


def axes_of(tensor, layout):
    """Returns the mesh axes that split each dim, read from the tensor.

    Axes of size 1 are read from its layout, because the torch mesh lacks them.
    """
    sizes = _sizes(layout.device_mesh)
    names = [
        [name for name in _names(axis) if sizes[name] == 1]
        for axis in layout.axes
    ]
    if isinstance(tensor, DTensor):
        mesh = tensor.device_mesh
        for axis, placement in zip(mesh.mesh_dim_names, tensor.placements):
            if is_shard(placement):
                names[placement.dim].append(axis)
    order = list(sizes)
    axes = []
    for found in names:
        found.sort(key=order.index)
        axes.append(tuple(found) if len(found) > 1 else (found or [None])[0])
    return tuple(axes)


def from_full(value, placement):
    """Returns the DTensor of a plain tensor that every process holds.

    Its shard is a copy, so the plain tensor can be freed.
    """
    mesh, placements = placement
    local = part_of(value, mesh, placements)
    if local is not value:
        # A view would keep the whole tensor alive.
        local = local.clone(memory_format=torch.contiguous_format)
    return _wrap(local, mesh, placements, value.shape)


def redistributed(tensor, placements):
    """Returns a DTensor with other placements on its mesh. A collective."""
    if any(
        isinstance(old, InBlocks) != isinstance(new, InBlocks)
        and is_shard(old)
        and is_shard(new)
        for old, new in zip(tensor.placements, placements)
    ):
        # DTensor has no exchange between these.
        whole = [
            Replicate() if is_shard(placed) else placed
            for placed in tensor.placements
        ]
        tensor = tensor.redistribute(placements=whole)
    return tensor.redistribute(placements=placements)


def part_of(value, mesh, placements):
    """Returns this process's part of a plain tensor, as a view if possible."""
    for i, placed in enumerate(placements):
        if isinstance(placed, InBlocks):
            count = placed.split_factor
            blocks = value.unflatten(placed.dim, (count, -1))
            blocks = blocks.tensor_split(mesh.size(i), placed.dim + 1)
            value = blocks[mesh.get_local_rank(i)]
            value = value.flatten(placed.dim, placed.dim + 1)
    placements = [
        Replicate() if isinstance(placed, InBlocks) else placed
        for placed in placements
    ]
    shape, offset = extent(value.shape, mesh, placements)
    part = value
    for dim, (size, start) in enumerate(zip(shape, offset)):
        if size != value.shape[dim]:
            part = part.narrow(dim, min(start, value.shape[dim]), size)
    return part


def ranges(shape, mesh, placements):
    """Returns what this process's part has of each dim.

    Returns:
        Tuple with a list for each dim: starts and ends, one after the other.
        A dim in blocks has a start and an end for each block.
    """
    found = [[(0, size)] for size in shape]
    for i, placed in enumerate(placements):
        if isinstance(placed, InBlocks):
            size = shape[placed.dim] // placed.split_factor
            small, larger = divmod(size, mesh.size(i))
            rank = mesh.get_local_rank(i)
            start = rank * small + min(rank, larger)
            stop = start + small + (rank < larger)
            found[placed.dim] = [
                (block * size + start, block * size + stop)
                for block in range(placed.split_factor)
            ]
    sizes = [sum(stop - start for start, stop in own) for own in found]
    others = [
        Replicate() if isinstance(placed, InBlocks) else placed
        for placed in placements
    ]
    sizes, starts = extent(sizes, mesh, others)
    return tuple(
        _narrowed(own, start, start + size)
        for own, start, size in zip(found, starts, sizes)
    )


def _narrowed(limits, first, last):
    """Returns what a part of some ranges, one after the other, has."""
    found, place = [], 0
    for start, stop in limits:
        a, b = max(first - place, 0), min(last - place, stop - start)
        if a < b:
            found.append((start + a, start + b))
        place += stop - start
    return found


def extent(shape, mesh, placements):
    """Returns the shape of this process's part, and the index of its start.

    DTensor's own function reads the index from a tensor. In a compiled step it
    would break the graph.

    Args:
        shape: Tuple of ints, of the whole tensor.
        mesh: torch's device mesh.
        placements: List with a DTensor placement for each mesh dim; none is in
            blocks.
    """
    shape, start = list(shape), [0] * len(shape)
    for mesh_dim, placed in enumerate(placements):
        if placed.is_shard():
            size = shape[placed.dim]
            most = -(-size // mesh.size(mesh_dim))
            first = min(most * mesh.get_local_rank(mesh_dim), size)
            shape[placed.dim] = min(most, size - first)
            start[placed.dim] += first
    return shape, start


def filled(shape, fill, dtype, placement):
    """Returns a DTensor filled with one value; allocates only its shard."""
    mesh, placements = placement
    local_shape, _ = compute_local_shape_and_global_offset(
        torch.Size(shape), mesh, placements
    )
    if fill == 0 and mesh.device_type == "cpu":
        size = math.prod(local_shape) * dtype.itemsize
        memory = torch.from_numpy(host_memory.zeros([size], np.dtype("uint8")))
        local = memory.view(dtype).view(local_shape)
    else:
        local = torch.full(
            local_shape, fill, dtype=dtype, device=mesh.device_type
        )
    return _wrap(local, mesh, placements, torch.Size(shape))


def to_full(tensor):
    """Returns a DTensor as a plain tensor, and any other tensor unchanged.

    A collective if the tensor is split. Differentiable.
    """
    if needs_communication(tensor):
        replicated = [Replicate()] * tensor.device_mesh.ndim
        tensor = tensor.redistribute(placements=replicated)
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def needs_communication(tensor):
    """Returns whether reading the whole tensor needs other processes."""
    return isinstance(tensor, DTensor) and not all(
        placement.is_replicate() for placement in tensor.placements
    )


def replicate(tensor, mesh):
    """Returns a plain tensor, equal on all processes, as a DTensor."""
    return DTensor.from_local(
        tensor, mesh, [Replicate()] * mesh.ndim, run_check=False
    )


def summed(placements):
    """Returns placements in which partial sums are all-reduced."""
    return tuple(Replicate() if p.is_partial() else p for p in placements)


def settled(tensor, wait=True):
    """Returns a tensor with its partial sums, if any, all-reduced.

    Args:
        tensor: DTensor, or another value, which is returned as it is.
        wait: Boolean. `False` only launches the all-reduce: the first
            operation that reads the result waits for it.
    """
    if not isinstance(tensor, DTensor):
        return tensor
    placements = summed(tensor.placements)
    if placements == tensor.placements:
        return tensor
    if not tensor.is_contiguous():
        # An all-reduce returns a contiguous tensor, but DTensor would keep the
        # old strides in its spec.
        tensor = tensor.contiguous()
    return tensor.redistribute(placements=placements, async_op=not wait)


def _wrap(local, mesh, placements, shape):
    stride = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    return DTensor.from_local(
        local,
        mesh,
        placements,
        run_check=False,
        shape=torch.Size(shape),
        stride=tuple(stride),
    )


def _sizes(device_mesh):
    return dict(zip(device_mesh.axis_names, device_mesh.shape))


def _names(axis):
    if axis is None:
        return ()
    return (axis,) if isinstance(axis, str) else tuple(axis)
