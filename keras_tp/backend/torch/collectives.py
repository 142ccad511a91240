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
    return _map(_sum, _sum, x, device_mesh, axis, source)


def all_gather(x, device_mesh, axis):
    """Concatenates `x` over an axis."""
    return _map(_concatenation, _part_of_sum, x, device_mesh, axis)


def reduce_scatter(x, device_mesh, axis, source=None):
    """Splits the result of `all_reduce` over the axis."""
    return _map(_part_of_sum, _concatenation, x, device_mesh, axis, source)


def _sum(part, group):
    return functional.all_reduce(part, "sum", group)


def _concatenation(part, group):
    return _all_gather(part, 1, group)


def _part_of_sum(part, group):
    return _reduce_scatter(part, "sum", 1, group)


class _Collective(torch.autograd.Function):
    """Runs a collective, and in the backward pass the one of its gradient."""

    @staticmethod
    def forward(context, part, run, run_backward, group):
        context.swapped = run_backward, run, group
        return functional.wait_tensor(run(part, group))

    @staticmethod
    def backward(context, gradient):
        gradient = gradient.contiguous()
        result = _Collective.apply(gradient, *context.swapped)
        return result, None, None, None


def _map(run, run_backward, x, device_mesh, axis, source=None):
    """Runs a collective on the shard of this process."""
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
    part = _Collective.apply(part, run, run_backward, (mesh, dim))
    return DTensor.from_local(part, mesh, placements, run_check=False)
