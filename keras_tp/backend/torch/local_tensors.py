"""This process's shards of tensors, below autograd."""

import functools

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Replicate
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._dtensor_spec import TensorMeta
from torch.distributed.tensor._utils import compute_global_tensor_info
from torch.utils import _pytree as pytree

from keras_tp.backend.torch import placement


def mesh_of(args, kwargs):
    """Returns the mesh of the first DTensor among the arguments."""
    for leaf in pytree.tree_leaves((args, kwargs)):
        if isinstance(leaf, DTensor):
            return leaf.device_mesh
    raise TypeError(f"No DTensor among the arguments. Received: args={args}")


def placements_of(tensor, mesh):
    """Returns the placements of a tensor; a plain one is replicated."""
    if isinstance(tensor, DTensor):
        return tensor.placements
    return (Replicate(),) * mesh.ndim


def local_part(tensor, mesh, placements):
    """Returns this process's shard of a tensor under the placements."""
    if isinstance(tensor, DTensor):
        if tuple(tensor.placements) != tuple(placements):
            tensor = tensor.redistribute(placements=placements)
        return tensor._local_tensor
    return placement.part_of(tensor, mesh, placements)


def wrap_parts(local, mesh, placements, shape=None):
    """Returns the DTensor of shards, below autograd.

    Args:
        local: Tensor, the shard of this process.
        mesh: torch's device mesh.
        placements: List with a DTensor placement for each mesh dim.
        shape: Tuple of ints, the shape of the whole tensor. Defaults to
            `None`: the shards are of one size.
    """
    if any(placed.is_partial() for placed in placements):
        # An all-reduce returns a contiguous tensor, so the strides in the spec
        # have to be contiguous too.
        local = local.contiguous()
    if shape is None:
        shape, stride = compute_global_tensor_info(local, mesh, placements)
    else:
        stride = _stride_of(shape, local)
    meta = TensorMeta(torch.Size(shape), tuple(stride), local.dtype)
    spec = DTensorSpec(mesh, tuple(placements), tensor_meta=meta)
    return DTensor(local, spec, requires_grad=False)


def settled_parts(local, mesh, placements, shape=None):
    """Returns the DTensor of a result, with its partial sums all-reduced."""
    return wrap_parts(local, mesh, placements, shape).redistribute(
        placements=placement.summed(placements)
    )


def is_even(tensor):
    """Returns whether all shards of a DTensor are of one size."""
    counts = [1] * tensor.ndim
    for size, placed in zip(tensor.device_mesh.shape, tensor.placements):
        if placed.is_shard():
            counts[placed.dim] *= size
    return not any(n % count for n, count in zip(tensor.shape, counts))


def even_only(handler):
    """Wraps a handler that assumes shards of one size; others are gathered."""

    @functools.wraps(handler)
    def run(op, args, kwargs):
        leaves = pytree.tree_leaves((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, DTensor)]
        if all(map(is_even, tensors)):
            return handler(op, args, kwargs)
        return replicated(op, args, kwargs)

    return run


def _stride_of(shape, local):
    """Returns the strides of a whole tensor, its dims ordered as a shard's."""
    stride, step = [1] * len(shape), 1
    for dim in sorted(range(len(shape)), key=lambda d: (local.stride(d), -d)):
        stride[dim] = step
        step *= max(shape[dim], 1)
    return stride


def replicated(op, args, kwargs):
    """Runs an operation whole on every process; its results are replicated."""
    mesh = mesh_of(args, kwargs)
    args, kwargs = pytree.tree_map_only(
        DTensor, placement.to_full, (args, kwargs)
    )
    return pytree.tree_map_only(
        torch.Tensor,
        lambda result: placement.replicate(result, mesh),
        op(*args, **kwargs),
    )
