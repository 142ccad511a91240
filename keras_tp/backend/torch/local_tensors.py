"""This process's shards of tensors, below autograd."""

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


def wrap_parts(local, mesh, placements):
    """Returns a DTensor of evenly split shards, below autograd."""
    if any(placed.is_partial() for placed in placements):
        # An all-reduce returns a contiguous tensor, so the strides in the spec
        # have to be contiguous too.
        local = local.contiguous()
    shape, stride = compute_global_tensor_info(local, mesh, placements)
    meta = TensorMeta(torch.Size(shape), tuple(stride), local.dtype)
    spec = DTensorSpec(mesh, tuple(placements), tensor_meta=meta)
    return DTensor(local, spec, requires_grad=False)


def settled_parts(local, mesh, placements):
    """Returns the DTensor of a result, with its partial sums all-reduced."""
    return wrap_parts(local, mesh, placements).redistribute(
        placements=placement.summed(placements)
    )


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
