"""Collectives with gradients; `backend/communication.py` documents them."""

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


def all_reduce(x, device_mesh, axis, source=None):
    """Adds up `x` over an axis, or only the part of device `source`."""
    return _map(_AllReduce, x, device_mesh, axis, source)


def all_gather(x, device_mesh, axis):
    """Concatenates `x` over an axis."""
    return _map(_AllGather, x, device_mesh, axis)


def reduce_scatter(x, device_mesh, axis, source=None):
    """Splits the result of `all_reduce` over the axis."""
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
    """Runs a function on the shard of this process."""
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
        # Not a product: 0 times NaN is NaN.
        part = part.masked_fill(torch.tensor(True, device=part.device), 0)
    part = function.apply(part, (mesh, dim))
    return DTensor.from_local(part, mesh, placements, run_check=False)


def _wait(tensor):
    return functional.wait_tensor(tensor)
