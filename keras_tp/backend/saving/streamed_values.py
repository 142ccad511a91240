"""Writes a split variable into an HDF5 file, piece by piece.

One process writes the file. Each of the others sends it its part in small
pieces. So no process ever has the whole variable.
"""

import itertools
import math

import numpy as np
from keras.src import backend

from keras_tp.backend import current
from keras_tp.backend import host_memory
from keras_tp.backend.saving import boxes
from keras_tp.backend.saving import tensor_files

# Smaller variables are gathered as a whole.
_LARGE_BYTES = 2**22
# Of the pieces of all processes together, and of each at least.
_PIECES_BYTES = 2**21
_LEAST_BYTES = 2**16


class Streamed:
    """A variable that a store takes like an array: it has shape and dtype.

    Args:
        variable: Keras variable, split over the processes.
    """

    def __init__(self, variable):
        self.variable = variable
        self.shape = tuple(variable.shape)
        self.dtype = backend.standardize_dtype(variable.dtype)


class Backend:
    """Keras's `backend` in its module of stores, which ask for numpy arrays."""

    def __init__(self, original):
        self._original = original

    def __getattr__(self, name):
        return getattr(self._original, name)

    def convert_to_numpy(self, x):
        """Leaves a value as it is that is written in pieces."""
        if isinstance(x, Streamed):
            return x
        return self._original.convert_to_numpy(x)


def of(value):
    """Returns a `Streamed` for a large split variable; `None` for others."""
    if isinstance(value, Streamed):
        return value
    if not _is_spread(value):
        return None
    found = Streamed(value)
    if not tensor_files.can_hold(found.dtype):
        return None
    itemsize = tensor_files.numpy_dtype(found.dtype).itemsize
    return found if math.prod(found.shape) * itemsize >= _LARGE_BYTES else None


def _is_spread(value):
    """Returns whether a value is a variable that several processes hold."""
    is_one = current.load("processes").world_size() == 1
    if is_one or not isinstance(value, backend.Variable):
        return False
    axes = current.load("distribution_lib").variable_axes(value)
    return axes is not None and any(axis is not None for axis in axes)


def write(streamed, group, key):
    """Writes a value into a new dataset, as Keras does. A collective.

    Args:
        streamed: `Streamed`, equal in all processes.
        group: `h5py.Group`; `None` in processes that do not write.
        key: String, the name of the dataset.

    Returns:
        `h5py.Dataset`, or `None`.
    """
    dtype, dataset = tensor_files.numpy_dtype(streamed.dtype), None
    if group is not None:
        dataset = group.create_dataset(key, streamed.shape, dtype)
        if streamed.dtype == "bfloat16":
            dataset.attrs["dtype"] = "bfloat16"
    for pieces in _rounds(streamed.variable, dtype):
        for box, values in pieces:
            dataset[tuple(slice(*limits) for limits in box)] = values
    host_memory.give_back()
    return dataset


def _rounds(variable, dtype):
    """Yields lists of boxes of a variable with their values, in process 0."""
    processes = current.load("processes")
    count = processes.world_size()
    piece_bytes = max(_LEAST_BYTES, _PIECES_BYTES // count)
    most = piece_bytes // dtype.itemsize
    parts = current.load("distribution_lib").variable_parts(variable)
    own = [(ranges, read) for ranges, is_written, read in parts if is_written]
    held = processes.gather(
        [_numbers(ranges) for ranges, _ in own], "the parts of a variable"
    )
    # The same buffers for all pieces: the C library would keep many of them.
    sent = host_memory.zeros([piece_bytes], np.dtype("uint8"))
    received = joined = None
    if processes.is_first():
        received = host_memory.zeros([count, piece_bytes], sent.dtype)
        joined = host_memory.zeros([count * piece_bytes], sent.dtype)
    cuts = [
        [box for part in rows for box in _boxes(part, most)] for rows in held
    ]
    for wanted, values in itertools.zip_longest(
        itertools.zip_longest(*cuts), _values(own, most)
    ):
        if values is not None:
            _view(sent, dtype, values.shape)[...] = values
        processes.send_to_first(sent, received)
        if received is not None:
            pieces = [
                (box, _view(received[index], dtype, _sizes(box)))
                for index, box in enumerate(wanted)
                if box is not None
            ]
            yield _joined(pieces, joined)


def _joined(pieces, data):
    """Returns boxes with values as one if they fill one together.

    Of a variable that is split along its last dim, they are whole rows then:
    HDF5 would read the rest of a row to write a part of it.
    """
    limits = list(zip(*(box for box, _ in pieces)))
    hull = [
        (min(start for start, _ in dim), max(stop for _, stop in dim))
        for dim in limits
    ]
    size = sum(values.size for _, values in pieces)
    if math.prod(_sizes(hull)) != size:
        return pieces
    whole = _view(data, pieces[0][1].dtype, _sizes(hull))
    for box, values in pieces:
        whole[boxes.within(box, hull)] = values
    return [(hull, whole)]


def _sizes(box):
    """Returns the shape of a box."""
    return [stop - start for start, stop in box]


def _view(data, dtype, shape):
    """Returns the start of some bytes as an array."""
    size = math.prod(shape) * dtype.itemsize
    return data[:size].view(dtype).reshape(shape)


def _values(own, most):
    """Yields the values of the boxes of `_boxes`, of all parts held here."""
    for ranges, read in own:
        part = read()
        for box, position in boxes.boxes_of(ranges):
            for cut in _cut(box, most):
                yield part[position][boxes.within(cut, box)]


def _boxes(ranges, most):
    """Yields the boxes of a part, of `most` elements each."""
    for box, _ in boxes.boxes_of(ranges):
        yield from _cut(box, most)


def _cut(box, most):
    """Yields boxes of at most `most` elements that cover a box."""
    sizes = _sizes(box)
    if math.prod(sizes) <= most:
        yield box
        return
    dim = next(dim for dim, size in enumerate(sizes) if size > 1)
    start, stop = box[dim]
    step = max(1, most // math.prod(sizes[dim + 1 :]))
    for begin in range(start, stop, step):
        cut = begin, min(begin + step, stop)
        yield from _cut((*box[:dim], cut, *box[dim + 1 :]), most)


def _numbers(ranges):
    """Returns ranges in types that can be sent."""
    return [[list(map(int, limits)) for limits in own] for own in ranges]
