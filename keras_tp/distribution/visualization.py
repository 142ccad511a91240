"""Shows which device holds which block of a variable."""

import collections
import math

import numpy as np

from keras_tp import backend
from keras_tp.distribution.planning import cost
from keras_tp.distribution.tensor_layout import axis_names
from keras_tp.distribution.tensor_layout import axis_size
from keras_tp.distribution.tensor_layout import axis_sizes
from keras_tp.distribution.tensor_layout import format_bytes

# Grids with more cells in a line are not drawn.
_MOST_COLUMNS, _MOST_LINES = 8, 16
# Of the devices in a cell and in a line, those that are named.
_IN_CELL, _IN_LINE = 3, 8


class Block(collections.namedtuple("Block", "ranges devices nbytes")):
    """A block of a variable, and the devices that hold it.

    Args:
        ranges: Tuple with a list of `(start, stop)` for each dim. There is more
            than one if the dim consists of blocks that are each split.
        devices: List of device names.
        nbytes: Int, its size in bytes.
    """


class VariablePicture(str):
    """A text that shows which device holds which block of a variable.

    Attributes:
        blocks: List of `Block`.
    """

    def __new__(cls, text, blocks):
        made = super().__new__(cls, text)
        made.blocks = blocks
        return made

    __repr__ = str.__str__


def visualize(variable):
    """Shows which device holds which block of a variable.

    A variable may have any rank. If one or two of its dims are split, a grid
    shows them.

    Example:

    ```python
    print(visualize(model.layers[0].kernel))
    ```

    Args:
        variable: A Keras variable that is built. The layout is read from its
            live array.

    Returns:
        A string, with an attribute `blocks` that has the same as data: a list
        of named tuples `(ranges, devices, nbytes)`.
    """
    lib = backend.distribution_lib
    axes = lib.variable_axes(variable)
    shape, dtype = tuple(variable.shape), variable._dtype
    head = f"{variable.path} {shape} {dtype}"
    whole = math.prod(shape) * cost.item_bytes(dtype)
    if axes is None:
        devices = list(lib.variable_bytes_by_device(variable))
        ranges = tuple([(0, size)] for size in shape)
        block = Block(ranges, devices, whole)
        text = f"{head}: {format_bytes(whole)} on one device, {devices[0]}"
        return VariablePicture(text, [block])
    layout = variable._layout
    mesh, parts = layout.device_mesh, getattr(layout, "blocks", {})
    blocks = _blocks(shape, axes, mesh, parts, cost.item_bytes(dtype))
    held = format_bytes(max(block.nbytes for block in blocks))
    lines = [
        f"{head}: {held} of {format_bytes(whole)} on each device",
        f"layout {axes} on a mesh {axis_sizes(mesh)}",
    ]
    grid = _grid(shape, axes, mesh, blocks)
    lines += ["", *grid] if grid else []
    return VariablePicture(
        "\n".join([*lines, "", *_table(shape, blocks)]), blocks
    )


def _blocks(shape, axes, mesh, parts, item):
    """Returns the `Block`s in the order of their first devices."""
    sizes = axis_sizes(mesh)
    found = {}
    for place, device in np.ndenumerate(mesh.devices):
        at = dict(zip(mesh.axis_names, place))
        ranges = []
        for dim, (size, axis) in enumerate(zip(shape, axes)):
            index = 0
            for name in axis_names(axis):
                # The first axis is the major one.
                index = index * sizes[name] + at[name]
            count = axis_size(mesh, axis)
            times = parts.get(dim, 1) if axis is not None else 1
            ranges.append(_ranges(size, index, count, times))
        key = tuple(map(tuple, ranges))
        found.setdefault(key, []).append(str(device))
    return [
        Block(tuple(map(list, key)), devices, _elements(key) * item)
        for key, devices in found.items()
    ]


def _ranges(size, index, count, times):
    """Returns the ranges of one part of a dim of several blocks."""
    block = size // times
    part = -(-block // count)
    start, stop = (min(k * part, block) for k in (index, index + 1))
    return [(k * block + start, k * block + stop) for k in range(times)]


def _elements(ranges):
    return math.prod(sum(b - a for a, b in dim) for dim in ranges)


def _range_text(dim, size):
    if dim == [(0, size)]:
        return ":"
    return " ".join(f"{start}:{stop}" for start, stop in dim)


def _table(shape, blocks):
    """Returns a line for each block: its ranges, its devices, its size."""
    rows = [("block", "size", "devices")]
    for block in blocks:
        texts = map(_range_text, block.ranges, shape)
        rows.append(
            (
                f"[{', '.join(texts)}]",
                format_bytes(block.nbytes),
                _names(block.devices, _IN_LINE),
            )
        )
    first, second = (max(len(row[k]) for row in rows) for k in (0, 1))
    return [f"{a.ljust(first)}  {b.rjust(second)}  {c}" for a, b, c in rows]


def _names(devices, most):
    left = len(devices) - most
    more = f" and {left} more" if left > 0 else ""
    return ", ".join(devices[:most]) + more


def _grid(shape, axes, mesh, blocks):
    """Returns the lines of a grid of the dims that are split, if there are two.

    The last of them runs from left to right; a dim in front of others from top
    to bottom.
    """
    split = [dim for dim, axis in enumerate(axes) if axis is not None]
    split = [dim for dim in split if axis_size(mesh, axes[dim]) > 1]
    if not 1 <= len(split) <= 2:
        return []
    if len(split) == 1:
        dim = split[0]
        is_last = dim == len(shape) - 1
        split = [None, dim] if is_last else [dim, None]
    keys = [
        list(dict.fromkeys(_text_of(block, dim, shape) for block in blocks))
        for dim in split
    ]
    if len(keys[0]) > _MOST_LINES or len(keys[1]) > _MOST_COLUMNS:
        return []
    cells = {
        tuple(_text_of(block, dim, shape) for dim in split): _names(
            block.devices, _IN_CELL
        )
        for block in blocks
    }
    rows = [
        [key, *(cells.get((key, other), "") for other in keys[1])]
        for key in keys[0]
    ]
    rows.insert(0, ["", *keys[1]])
    widths = [max(map(len, column)) for column in zip(*rows)]
    rule = " " * widths[0] + " +" + "+".join("-" * (w + 2) for w in widths[1:])
    names = [f"dim {dim}" for dim in split if dim is not None]
    directions = ("down", "across") if len(names) == 2 else ("",)
    said = ", ".join(f"{a} {b}".strip() for a, b in zip(names, directions))
    lines = [said, *_lines(rows[:1], widths, " "), f"{rule}+"]
    for line in _lines(rows[1:], widths, "|"):
        lines += [line, f"{rule}+"]
    return lines


def _text_of(block, dim, shape):
    return ":" if dim is None else _range_text(block.ranges[dim], shape[dim])


def _lines(rows, widths, border):
    for first, *others in rows:
        inside = f" {border} ".join(
            text.ljust(width) for text, width in zip(others, widths[1:])
        )
        yield f"{first.ljust(widths[0])} {border} {inside} {border}".rstrip()
