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
    args, kwargs = pytree.tree_map_only(
        DTensor, placement.to_full, (args[1:], kwargs)
    )
    drawn = op(_plain_like(op, tensor), *args, **kwargs)
    tensor._local_tensor.copy_(_own_part(drawn, tensor)._local_tensor)
    return tensor


def random_like(op, args, kwargs):
    """Draws the numbers of a plain tensor, split like the argument."""
    like = args[0]
    whole = _plain_like(op, like)
    if op in (aten.bernoulli.default, aten.bernoulli.p):
        # The argument holds probabilities.
        whole = placement.to_full(like)
    return _own_part(op(whole, *args[1:], **kwargs), like)


def native_dropout(op, args, kwargs):
    """Drops the same elements as on one device."""
    x, rate, train = args
    scale, mask = op(_plain_like(op, x).fill_(1), rate, train)
    scale, mask = _own_part(scale, x), _own_part(mask, x)
    kept = x._local_tensor * scale._local_tensor
    kept = local_tensors.wrap_parts(kept, x.device_mesh, x.placements, x.shape)
    return kept, mask


def _plain_like(op, tensor):
    """Returns a plain tensor without values, of a DTensor's shape."""
    if any(p.is_partial() for p in tensor.placements):
        raise NotImplementedError(
            f"{op} cannot draw numbers for a tensor of partial sums. Received: "
            f"placements={tensor.placements}"
        )
    return torch.empty_strided(
        tensor.shape,
        tensor.stride(),
        dtype=tensor.dtype,
        device=tensor._local_tensor.device,
    )


def _own_part(drawn, like):
    return local_tensors.wrap_parts(
        local_tensors.local_part(drawn, like.device_mesh, like.placements),
        like.device_mesh,
        like.placements,
        like.shape,
    )
