"""Collectives with gradients, for layers that are written by hand.

The first dim of a tensor indexes the devices of one mesh axis, and is split
over that axis: device `i` of the axis holds `x[i]`. The other dims keep their
splits. Each function is a linear map of such tensors, so `Returns:` defines it
without any device.

Every process has to call each of them.
"""

import torch
import torch.distributed._functional_collectives as functional
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Replicate
from torch.distributed.tensor import Shard

from keras_tp.backend.torch import placement

# Newer versions of torch rename these functions.
_all_gather = getattr(
    functional, "all_gather_single", functional.all_gather_tensor
)
_reduce_scatter = getattr(
    functional, "reduce_scatter_single", functional.reduce_scatter_tensor
)


def all_reduce(x, device_mesh, axis):
    """Sums the parts of an axis's devices; each device gets the sum.

    The gradient is an all-reduce too.

    Args:
        x: Tensor of shape `(n, ...)`; the axis has `n` devices.
        device_mesh: `DeviceMesh`.
        axis: String, axis of the mesh.

    Returns:
        Tensor of the same shape: `y[i] = sum(x[j] for all j)`.
    """
    return _map(_AllReduce, x, device_mesh, axis)


def all_gather(x, device_mesh, axis):
    """Concatenates the parts of an axis's devices; each device gets all.

    The gradient is a reduce-scatter.

    Args:
        x: Tensor of shape `(n, k, ...)`; the axis has `n` devices.
        device_mesh: `DeviceMesh`.
        axis: String, axis of the mesh.

    Returns:
        Tensor of shape `(n, n * k, ...)`: `y[i] = concatenate(x)`.
    """
    return _map(_AllGather, x, device_mesh, axis)


def reduce_scatter(x, device_mesh, axis):
    """Sums the parts of an axis's devices; each gets its part of the sum.

    The gradient is an all-gather.

    Args:
        x: Tensor of shape `(n, n * k, ...)`; the axis has `n` devices.
        device_mesh: `DeviceMesh`.
        axis: String, axis of the mesh.

    Returns:
        Tensor of shape `(n, k, ...)`: `y[i] = split(sum(x), n)[i]`.
    """
    return _map(_ReduceScatter, x, device_mesh, axis)


def broadcast(x, device_mesh, axis, source=0):
    """Sends the part of one device to all devices of an axis.

    Implemented as an all-reduce with zeros. The gradient is the sum over the
    devices, on the source device.

    Args:
        x: Tensor of shape `(n, ...)`; the axis has `n` devices.
        device_mesh: `DeviceMesh`.
        axis: String, axis of the mesh.
        source: Int, index of the device on the axis. Defaults to 0.

    Returns:
        Tensor of the same shape: `y[i] = x[source]`.
    """
    return _map(_AllReduce, x, device_mesh, axis, source)


def scatter(x, device_mesh, axis, source=0):
    """Splits the part of one device over all devices of an axis.

    Implemented as a reduce-scatter with zeros. The gradient is gathered on the
    source device.

    Args:
        x: Tensor of shape `(n, n * k, ...)`; the axis has `n` devices.
        device_mesh: `DeviceMesh`.
        axis: String, axis of the mesh.
        source: Int, index of the device on the axis. Defaults to 0.

    Returns:
        Tensor of shape `(n, k, ...)`: `y[i] = split(x[source], n)[i]`.
    """
    return _map(_ReduceScatter, x, device_mesh, axis, source)


class _AllReduce(torch.autograd.Function):
    """Sums parts of shape `(1, ...)` over the processes of a group."""

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
    """Runs a function on this process's part of a tensor."""
    mesh = device_mesh.backend_mesh
    names = () if mesh is None else mesh.mesh_dim_names
    if axis not in names:
        # With one device on the axis, each function is the identity.
        return x
    dim = names.index(axis)
    if not isinstance(x, DTensor):
        x = placement.replicate(x, mesh)
    # This axis splits the first dim; the other axes split what they did.
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
