"""Reshapes and repeats of which a split dim is a part."""

import collections
import functools
import math

import torch
from keras.src.backend.torch import core
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Partial
from torch.distributed.tensor import Replicate
from torch.distributed.tensor import Shard

from keras_tp.backend.torch import local_tensors
from keras_tp.backend.torch import placement


def hook_reshape(original):
    """Gathers a split dim if its new shape cannot stay split.

    DTensor raises if a split dim becomes several dims, and the number of
    devices does not divide the first of them. So it is with the gradient.
    """

    @functools.wraps(original)
    def reshape(x, *shape, **kwargs):
        if isinstance(x, DTensor) and any(
            map(placement.is_shard, x.placements)
        ):
            sizes = kwargs.get("shape", shape)
            if len(sizes) == 1 and not isinstance(sizes[0], int):
                sizes = sizes[0]
            x = _divisible(x, [int(size) for size in sizes])
        result = original(x, *shape, **kwargs)
        if isinstance(result, DTensor) and result.requires_grad:
            sizes, devices = list(x.shape), result.device_mesh.shape
            if not all(
                _keeps(result.shape, sizes, dim, count)
                for dim in range(result.ndim)
                for count in (result.device_mesh.size(), *devices)
                if count > 1
            ):
                # The gradient is reshaped back.
                result.register_hook(lambda dy: _divisible(dy, sizes))
        return result

    return reshape


def _divisible(x, sizes):
    if -1 in sizes and x.numel():
        known = -math.prod(sizes)
        sizes[sizes.index(-1)] = x.numel() // known
    # Several mesh dims may split one dim.
    parts, placements = collections.Counter(), []
    for p, count in zip(x.placements, x.device_mesh.shape):
        if placement.is_shard(p):
            count *= parts[p.dim] or 1
            if _stays(p, x.shape, sizes, count):
                parts[p.dim] = count
            else:
                p = Replicate()
        placements.append(p)
    if placements == list(x.placements):
        return x
    return x.redistribute(placements=placements)


def _stays(placed, shape, sizes, count):
    """Returns whether a split dim can stay split in the new shape."""
    if not isinstance(placed, placement.InBlocks):
        return _keeps(shape, sizes, placed.dim, count)
    # The blocks get a dim of their own, or the dim stays as it is.
    before = math.prod(shape[: placed.dim])
    starts = [math.prod(sizes[:i]) for i in range(len(sizes))]
    if before not in starts:
        return False
    i = starts.index(before)
    if sizes[i] == shape[placed.dim]:
        return True
    return (
        sizes[i] == placed.split_factor
        and i + 1 < len(sizes)
        and sizes[i + 1] % count == 0
    )


def _keeps(shape, sizes, dim, count):
    """Returns whether a split dim can stay split in the new shape."""
    before = math.prod(shape[:dim])
    for i, size in enumerate(sizes):
        if math.prod(sizes[:i]) == before and 1 < size < shape[dim]:
            return size % count == 0
    return True


def hook_split(original):
    """Takes the blocks of a dim that is split in blocks from each shard."""

    @functools.wraps(original)
    def split(x, indices_or_sections, axis=0):
        x = core.convert_to_tensor(x)
        if isinstance(x, DTensor) and not torch.compiler.is_compiling():
            count = _blocks_of(x, axis % x.ndim)
            size = x.shape[axis] // (count or 1)
            wanted = indices_or_sections
            if isinstance(wanted, (list, tuple)):
                wanted = [int(end) for end in wanted]
            if count and wanted in (count, [*range(size, count * size, size)]):
                return list(_Blocks.apply(x, count, axis % x.ndim))
        return original(x, indices_or_sections, axis=axis)

    return split


def _blocks_of(x, dim):
    """Returns the number of blocks that a dim is split in, or `None`."""
    for placed in x.placements:
        if isinstance(placed, placement.InBlocks) and placed.dim == dim:
            return placed.split_factor
    return None


class _Blocks(torch.autograd.Function):
    """Splits a dim to its blocks."""

    @staticmethod
    def forward(ctx, x, count, dim):
        ctx.spec, ctx.dim = x._spec, dim
        ctx.of_block = [
            Shard(dim)
            if isinstance(placed, placement.InBlocks) and placed.dim == dim
            else placed
            for placed in x.placements
        ]
        shape = list(x.shape)
        shape[dim] //= count
        return tuple(
            local_tensors.wrap_parts(
                part.contiguous(), x.device_mesh, ctx.of_block, shape
            )
            for part in x._local_tensor.chunk(count, dim)
        )

    @staticmethod
    def backward(ctx, *gradients):
        mesh = ctx.spec.mesh
        # A partial sum of one block cannot be joined with another's whole.
        of_block = placement.summed(ctx.of_block)
        parts = [
            local_tensors.local_part(gradient, mesh, of_block)
            for gradient in gradients
        ]
        local = torch.cat(parts, ctx.dim)
        placements = placement.summed(ctx.spec.placements)
        shape = ctx.spec.shape
        whole = local_tensors.wrap_parts(local, mesh, placements, shape)
        return whole, None, None


def hook_repeat(original):
    """Repeats KV heads for the query heads, on each process's shard.

    Keras adds a dim, expands it and joins it with the dim of heads. If the
    query heads are split over more devices than there are KV heads, no device
    holds a whole group of query heads, and DTensor cannot separate the joined
    dim in the gradient. Here each process sums the gradients of its own heads,
    and one all-reduce adds the sums.
    """

    @functools.wraps(original)
    def repeat(x, repeats, axis=None):
        x = core.convert_to_tensor(x)
        if (
            isinstance(x, DTensor)
            and isinstance(repeats, int)
            and axis is not None
            and not torch.compiler.is_compiling()
            and not any(
                placed.is_partial()
                or placement.is_shard(placed)
                and placed.dim == axis % x.ndim
                for placed in x.placements
            )
        ):
            return _Repeat.apply(x, repeats, axis % x.ndim)
        return original(x, repeats, axis=axis)

    return repeat


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
        _, offset = placement.extent(gradient.shape, mesh, placements)
        positions = torch.arange(local.shape[axis], device=local.device)
        shape = list(local.shape)
        shape[axis] = ctx.spec.shape[axis]
        summed = local.new_zeros(shape).index_add_(
            axis, (positions + offset[axis]) // ctx.repeats, local
        )
        placements = [Partial() if p == Shard(axis) else p for p in placements]
        return local_tensors.settled_parts(summed, mesh, placements), None, None
