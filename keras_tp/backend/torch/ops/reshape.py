"""Reshapes in which a split dim cannot stay split."""

import functools
import math

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
        return original(x, *shape, **kwargs)

    return reshape


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
