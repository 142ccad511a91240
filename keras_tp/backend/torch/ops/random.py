"""Random numbers: every process draws the whole tensor and keeps its shard."""

import torch
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from keras_tp.backend.torch import local_tensors
from keras_tp.backend.torch import placement

aten = torch.ops.aten


def random_in_place(op, args, kwargs):
    """Fills a DTensor with the numbers that a plain tensor would get."""
    tensor = args[0]
    _refuse_partial(op, tensor)
    whole = torch.empty_strided(
        tensor.shape,
        tensor.stride(),
        dtype=tensor.dtype,
        device=tensor._local_tensor.device,
    )
    args, kwargs = pytree.tree_map_only(
        DTensor, placement.to_full, (args[1:], kwargs)
    )
    op(whole, *args, **kwargs)
    tensor._local_tensor.copy_(
        local_tensors.local_part(whole, tensor.device_mesh, tensor.placements)
    )
    return tensor


def random_like(op, args, kwargs):
    """Draws the numbers of a plain tensor, split like the argument."""
    like = args[0]
    _refuse_partial(op, like)
    mesh = like.device_mesh
    whole = torch.empty_strided(
        like.shape,
        like.stride(),
        dtype=like.dtype,
        device=like._local_tensor.device,
    )
    if op is aten.bernoulli.default or op is aten.bernoulli.p:
        # The argument holds probabilities.
        whole = placement.to_full(like)
    return local_tensors.wrap_parts(
        local_tensors.local_part(
            op(whole, *args[1:], **kwargs), mesh, like.placements
        ),
        mesh,
        like.placements,
    )


def native_dropout(op, args, kwargs):
    """Drops the same elements as on one device."""
    x, rate, train = args
    _refuse_partial(op, x)
    mesh = x.device_mesh
    ones = torch.empty_strided(
        x.shape, x.stride(), dtype=x.dtype, device=x._local_tensor.device
    ).fill_(1)
    scale, mask = (
        local_tensors.local_part(whole, mesh, x.placements)
        for whole in op(ones, rate, train)
    )
    return (
        local_tensors.wrap_parts(x._local_tensor * scale, mesh, x.placements),
        local_tensors.wrap_parts(mask, mesh, x.placements),
    )


def _refuse_partial(op, tensor):
    if any(p.is_partial() for p in tensor.placements):
        raise NotImplementedError(
            f"{op} cannot draw numbers for a tensor whose parts are not added "
            f"up yet. Received: placements={tensor.placements}"
        )
