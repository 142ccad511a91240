"""Boxes of a tensor: a tuple with the start and the end in each dim."""

import itertools
import math

from keras_tp.backend import host_memory


def shared(box, other):
    """Returns the box that two boxes share, or `None`."""
    found = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(box, other))
    return found if all(start < stop for start, stop in found) else None


def within(box, outer):
    """Returns where a box lies in the array of another one that holds it."""
    return tuple(
        slice(start - first, stop - first)
        for (start, stop), (first, _) in zip(box, outer)
    )


def overlap(box, others):
    """Returns whether a box shares elements with one of others."""
    # The box of a scalar is an empty tuple.
    return any(shared(box, other) is not None for other in others)


def check_tiles(name, shape, boxes):
    """Checks that boxes cover a shape, each of its elements once."""
    count = 0
    for i, box in enumerate(boxes):
        inside = len(box) == len(shape) and all(
            0 <= start <= stop <= size
            for (start, stop), size in zip(box, shape)
        )
        if not inside or overlap(box, boxes[:i]):
            raise ValueError(
                f"The parts of {name!r} overlap or leave its shape {shape}. "
                f"Received: {box}"
            )
        count += math.prod([b - a for a, b in box])
    if count != math.prod(shape):
        raise ValueError(
            f"The parts of {name!r} hold {count} numbers; its shape is {shape}."
        )


def boxes_of(ranges):
    """Yields the boxes of a part, and their positions in its array.

    Args:
        ranges: Tuple with a list for each dim: the starts and ends of what the
            part has of this dim, one after the other.
    """
    dims = []
    for own in ranges:
        stops = list(itertools.accumulate(stop - start for start, stop in own))
        starts = [0, *stops[:-1]]
        dims.append(list(zip(own, map(slice, starts, stops))))
    for found in itertools.product(*dims):
        box = tuple(limits for limits, _ in found)
        if all(start < stop for start, stop in box):
            # The ellipsis makes a view of an array without dims, too.
            yield box, (*(position for _, position in found), ...)


def read_part(ranges, dtype, copy_box):
    """Returns the array of a part, read box by box.

    Args:
        ranges: As in `boxes_of`.
        dtype: numpy's dtype of the array.
        copy_box: Function that copies a box of the tensor to an array.
    """
    size = [sum(stop - start for start, stop in own) for own in ranges]
    part = host_memory.zeros(size, dtype)
    for box, position in boxes_of(ranges):
        copy_box(part[position], box)
    return part
