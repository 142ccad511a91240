"""Collectives with gradients, for layers that are written by hand.

A tensor has the devices of one mesh axis as its first dim, split over that
axis: `x[i]` is what device `i` of the axis holds. Each function is a linear
map of such tensors, so it means the same without any device: see `Returns:`.
The other dims stay as they are split.

Every process calls each of them.
"""

import torch
import torch.distributed._functional_collectives as functional
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Replicate
from torch.distributed.tensor import Shard

from keras_tp.backend.torch import placement

# torch gives them new names.
_all_gather = getattr(
    functional, "all_gather_single", functional.all_gather_tensor
)
_reduce_scatter = getattr(
    functional, "reduce_scatter_single", functional.reduce_scatter_tensor
)


def all_reduce(x, device_mesh, axis):
    """Adds up what the devices of an axis hold; each has the sum.

    The gradient is an all-reduce too.

    Args:
        x: Tensor of shape `(n, ...)`, `n` devices being on the axis.
        device_mesh: `DeviceMesh`.
        axis: String, axis of the mesh.

    Returns:
        Tensor of the same shape: `y[i] = sum(x[j] for all j)`.
    """
    return _map(_AllReduce, x, device_mesh, axis)


def all_gather(x, device_mesh, axis):
    """Puts together what the devices of an axis hold; each has all of it.

    The gradient is a reduce-scatter.

    Args:
        x: Tensor of shape `(n, k, ...)`, `n` devices being on the axis.
        device_mesh: `DeviceMesh`.
        axis: String, axis of the mesh.

    Returns:
        Tensor of shape `(n, n * k, ...)`: `y[i] = concatenate(x)`.
    """
    return _map(_AllGather, x, device_mesh, axis)


def reduce_scatter(x, device_mesh, axis):
    """Adds up what the devices of an axis hold; each has its part of the sum.

    The gradient is an all-gather.

    Args:
        x: Tensor of shape `(n, n * k, ...)`, `n` devices being on the axis.
        device_mesh: `DeviceMesh`.
        axis: String, axis of the mesh.

    Returns:
        Tensor of shape `(n, k, ...)`: `y[i] = split(sum(x), n)[i]`.
    """
    return _map(_ReduceScatter, x, device_mesh, axis)


def broadcast(x, device_mesh, axis, source=0):
    """Gives all devices of an axis what one of them holds.

    The gradient is the sum over the devices, on the one they came from. Done as
    an all-reduce with zeros.

    Args:
        x: Tensor of shape `(n, ...)`, `n` devices being on the axis.
        device_mesh: `DeviceMesh`.
        axis: String, axis of the mesh.
        source: Int, index of the device on the axis. Defaults to 0.

    Returns:
        Tensor of the same shape: `y[i] = x[source]`.
    """
    return _map(_AllReduce, x, device_mesh, axis, source)


def scatter(x, device_mesh, axis, source=0):
    """Gives each device of an axis its part of what one of them holds.

    The gradient is gathered on the device that the parts came from. Done as
    a reduce-scatter with zeros.

    Args:
        x: Tensor of shape `(n, n * k, ...)`, `n` devices being on the axis.
        device_mesh: `DeviceMesh`.
        axis: String, axis of the mesh.
        source: Int, index of the device on the axis. Defaults to 0.

    Returns:
        Tensor of shape `(n, k, ...)`: `y[i] = split(x[source], n)[i]`.
    """
    return _map(_ReduceScatter, x, device_mesh, axis, source)


class _AllReduce(torch.autograd.Function):
    """Sum over the processes of a group, each with `(1, ...)`."""

    @staticmethod
    def forward(context, part, group):
        context.group = group
        return _wait(functional.all_reduce(part, "sum", group))

    @staticmethod
    def backward(context, gradient):
        return _AllReduce.apply(gradient.contiguous(), context.group), None


class _AllGather(torch.autograd.Function):
    """From `(1, k, ...)` in each process to `(1, n * k, ...)` in each."""

    @staticmethod
    def forward(context, part, group):
        context.group = group
        return _wait(_all_gather(part, 1, group))

    @staticmethod
    def backward(context, gradient):
        return _ReduceScatter.apply(gradient.contiguous(), context.group), None


class _ReduceScatter(torch.autograd.Function):
    """From `(1, n * k, ...)` in each process to `(1, k, ...)` in each."""

    @staticmethod
    def forward(context, part, group):
        context.group = group
        return _wait(_reduce_scatter(part, "sum", 1, group))

    @staticmethod
    def backward(context, gradient):
        return _AllGather.apply(gradient.contiguous(), context.group), None


def _map(function, x, device_mesh, axis, source=None):
    """Runs a function on what this process holds of a tensor."""
    mesh = device_mesh.backend_mesh
    names = () if mesh is None else mesh.mesh_dim_names
    if axis not in names:
        # One device holds all there is.
        return x
    dim = names.index(axis)
    if not isinstance(x, DTensor):
        x = placement.replicate(x, mesh)
    # Only the axis is given away by the other dims, and taken by the first.
    placements = [
        Shard(0) if i == dim else Replicate() if p.is_partial() else p
        for i, p in enumerate(x.placements)
    ]
    x = x.redistribute(placements=placements)
    part = x.to_local(grad_placements=placements).contiguous()
    if source is not None and mesh.get_local_rank(dim) != source:
        part = part * 0
    part = function.apply(part, (mesh, dim))
    return DTensor.from_local(part, mesh, placements, run_check=False)


def _wait(tensor):
    return functional.wait_tensor(tensor)
