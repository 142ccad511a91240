"""Reshapes in which a split dim cannot stay split."""

import functools
import math

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Replicate


def hook_reshape(original):
    """Gathers a split dim if its new shape cannot stay split.

    DTensor raises if a split dim becomes several dims, and the number of
    devices does not divide the first of them.
    """

    @functools.wraps(original)
    def reshape(x, *shape, **kwargs):
        if isinstance(x, DTensor) and any(p.is_shard() for p in x.placements):
            sizes = kwargs.get("shape", shape)
            if len(sizes) == 1 and not isinstance(sizes[0], int):
                sizes = sizes[0]
            x = _divisible(x, [int(size) for size in sizes])
        result = original(x, *shape, **kwargs)
        if isinstance(result, DTensor) and not all(
            _keeps(result.shape, x.shape, dim, count)
            for dim in range(result.ndim)
            for count in result.device_mesh.shape
            if count > 1
        ):
            result = _DivisibleGradient.apply(result, tuple(x.shape))
        return result

    return reshape


class _DivisibleGradient(torch.autograd.Function):
    """Gathers a gradient that cannot stay split in the shape of the input."""

    @staticmethod
    def forward(ctx, x, sizes):
        ctx.sizes = sizes
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        if isinstance(gradient, DTensor):
            gradient = _divisible(gradient, list(ctx.sizes))
        return gradient, None


def _divisible(x, sizes):
    if -1 in sizes and x.numel():
        known = -math.prod(sizes)
        sizes[sizes.index(-1)] = x.numel() // known
    placements = [
        Replicate()
        if p.is_shard() and not _keeps(x.shape, sizes, p.dim, count)
        else p
        for p, count in zip(x.placements, x.device_mesh.shape)
    ]
    if placements == list(x.placements):
        return x
    return x.redistribute(placements=placements)


def _keeps(shape, sizes, dim, count):
    """Returns whether a split dim can stay split in the new shape."""
    before = math.prod(shape[:dim])
    for i, size in enumerate(sizes):
        if math.prod(sizes[:i]) == before and 1 < size < shape[dim]:
            return size % count == 0
    return True
