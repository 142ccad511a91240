"""Repeats KV heads for the query heads, on each process's shard.

Keras adds a dim, expands it and joins it with the dim of heads. If the query
heads are split over more devices than there are KV heads, no device holds a
whole group of query heads, and DTensor cannot separate the joined dim in the
gradient. Here each process sums the gradients of its own heads, and one
all-reduce adds the sums.
"""

import functools

import torch
from keras.src.backend.torch import core
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Partial
from torch.distributed.tensor import Shard
from torch.distributed.tensor._utils import (
    compute_local_shape_and_global_offset,
)

from keras_tp.backend.torch import local_tensors
from keras_tp.backend.torch import placement


def repeat(original):
    """Wraps `keras.src.backend.torch.numpy.repeat`."""

    @functools.wraps(original)
    def replacement(x, repeats, axis=None):
        x = core.convert_to_tensor(x)
        if (
            isinstance(x, DTensor)
            and isinstance(repeats, int)
            and axis is not None
            and not torch.compiler.is_compiling()
            and not any(
                placed.is_partial() or placed.is_shard(axis % x.ndim)
                for placed in x.placements
            )
        ):
            return _Repeat.apply(x, repeats, axis % x.ndim)
        return original(x, repeats, axis=axis)

    return replacement


class _Repeat(torch.autograd.Function):
    """Repeats along a dim that is not split."""

    @staticmethod
    def forward(ctx, x, repeats, axis):
        ctx.spec, ctx.repeats, ctx.axis = x._spec, repeats, axis
        local = x._local_tensor.repeat_interleave(repeats, dim=axis)
        return local_tensors.wrap_parts(local, x.device_mesh, x.placements)

    @staticmethod
    def backward(ctx, gradient):
        mesh, axis = ctx.spec.mesh, ctx.axis
        if not isinstance(gradient, DTensor):
            gradient = placement.replicate(gradient, mesh)
        placements = [
            given if of_x.is_replicate() and given == Shard(axis) else of_x
            for of_x, given in zip(ctx.spec.placements, gradient.placements)
        ]
        local = local_tensors.local_part(gradient, mesh, placements)
        _, offset = compute_local_shape_and_global_offset(
            gradient.shape, mesh, placements
        )
        positions = torch.arange(local.shape[axis], device=local.device)
        shape = list(local.shape)
        shape[axis] = ctx.spec.shape[axis]
        summed = local.new_zeros(shape).index_add_(
            axis, (positions + offset[axis]) // ctx.repeats, local
        )
        placements = [Partial() if p == Shard(axis) else p for p in placements]
        return local_tensors.settled_parts(summed, mesh, placements), None, None
