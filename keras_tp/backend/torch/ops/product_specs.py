"""Where the product of two DTensors is split, from the splits of both."""

import functools

import torch
from torch.distributed.tensor import Partial
from torch.distributed.tensor import Replicate
from torch.distributed.tensor import Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._dtensor_spec import TensorMeta

from keras_tp.backend.torch import placement


@functools.lru_cache(maxsize=4096)
def split_like(equation, x, y):
    """Returns the placements of an operand, split where the other is.

    Only along dims that both operands and the product have.

    Args:
        equation: String without spaces.
        x: `DTensorSpec` of the operand.
        y: `DTensorSpec` of the other one.
    """
    found = _operands_of(equation, x, y)
    if found is None:
        return x.placements
    left, right, out = found
    placements = list(x.placements)
    for i, (of_x, of_y) in enumerate(zip(x.placements, y.placements)):
        if not of_x.is_replicate() or type(of_y) is not Shard:
            continue
        letter = right[of_y.dim]
        if letter not in left or letter not in out:
            continue
        dim = left.index(letter)
        # Not if it is broadcast.
        if x.shape[dim] == y.shape[of_y.dim]:
            placements[i] = Shard(dim)
    return tuple(placements)


@functools.lru_cache(maxsize=4096)
def spec_of(equation, x, y):
    """Returns the spec of a product; `None` if it is left to DTensor.

    Args:
        equation: String without spaces.
        x: `DTensorSpec` of an operand.
        y: `DTensorSpec` of the other operand.
    """
    found = _operands_of(equation, x, y)
    dtype = x.tensor_meta.dtype
    if found is None or dtype.is_complex:
        return None
    left, right, out = found
    sizes = dict(zip(left, x.shape))
    if any(
        sizes.setdefault(a, size) != size for a, size in zip(right, y.shape)
    ):
        # Broadcasting is left to DTensor.
        return None
    placements = []
    for of_x, of_y in zip(x.placements, y.placements):
        placed = _placement_of(found, of_x, of_y)
        if placed is None:
            return None
        placements.append(placed)
    shape = torch.Size(sizes[letter] for letter in out)
    stride = torch.empty(shape, device="meta").stride()
    meta = TensorMeta(shape, stride, dtype)
    return DTensorSpec(x.mesh, tuple(placements), tensor_meta=meta)


def _placement_of(names, of_x, of_y):
    """Returns the placement of a product on a mesh dim; `None` for no rule."""
    left, right, out = names
    split = []
    for letters, placed in ((left, of_x), (right, of_y)):
        if type(placed) is Shard:
            split.append((letters[placed.dim], 1))
        elif isinstance(placed, placement.InBlocks):
            split.append((letters[placed.dim], placed.split_factor))
        elif placed.is_replicate():
            split.append(("", 1))
        else:
            return None
    (a, _), (b, _) = split
    if split[0] == split[1] or not b and a not in right:
        letter, blocks = split[0]
    elif not a and b not in left:
        letter, blocks = split[1]
    else:
        return None
    if not letter:
        return Replicate()
    if letter not in out:
        return Partial()
    dim = out.index(letter)
    if blocks > 1:
        return placement.InBlocks(dim, split_factor=blocks)
    return Shard(dim)


def _operands_of(equation, x, y):
    """Returns `operands`; `None` also if the specs do not fit the equation."""
    found = operands(equation)
    if found is None or x.mesh != y.mesh:
        return None
    left, right, _ = found
    return found if (len(left), len(right)) == (x.ndim, y.ndim) else None


@functools.lru_cache(maxsize=4096)
def operands(equation):
    """Returns the dims of both operands and of the result, as strings.

    Returns `None` unless each dim occurs in at least two of the three, and at
    most once in each: only then are the gradients products too.
    """
    both, arrow, out = equation.partition("->")
    left, comma, right = both.partition(",")
    if not (arrow and comma) or not (left + right + out).isalpha():
        return None
    if any(len(set(letters)) < len(letters) for letters in (left, right, out)):
        return None
    for letters, others in (
        (left, right + out),
        (right, left + out),
        (out, left + right),
    ):
        if not set(letters) <= set(others):
            return None
    return left, right, out
