"""Boxes of a tensor: what a device holds of it."""

import itertools

import numpy as np


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
    part = np.empty(size, dtype)
    for box, position in boxes_of(ranges):
        copy_box(part[position], box)
    return part
