"""Predicted bytes per device and predicted collectives.

Sizes have the form `coefficient * batch**b * length**l` bytes, so that one plan
gives predictions for any batch size and sequence length. A number may be added
to the batch and to the length.
"""

import collections

from keras.src.utils.dtype_utils import dtype_size

# Keras optimizer -> its number of slots, each of the size of its variable.
SLOTS = {
    "adadelta": 2,
    "adagrad": 1,
    "adam": 2,
    "adamax": 2,
    "adamw": 2,
    "ftrl": 2,
    "lion": 1,
    "nadam": 2,
    "rmsprop": 1,
    "sgd": 0,
    "sgd_momentum": 1,
}


class CollectiveCount(collections.namedtuple("CollectiveCount", "count bytes")):
    """How often a step communicates in one way, and how much.

    Args:
        count: Int, number of tensors.
        bytes: Int, size of the results on one device together.
    """

    def __repr__(self):
        return f"(count={self.count}, bytes={self.bytes})"


class Size(
    collections.namedtuple(
        "Size",
        ["coefficient", "batch", "length", "offset", "added"],
        defaults=[0, 0],
    )
):
    """A number of bytes that grows with the batch and the sequence length.

    Args:
        coefficient: Int or float.
        batch: Int, exponent of the batch size.
        length: Int, exponent of the sequence length.
        offset: Int or float, added to the sequence length, such as the number
            of image tokens before a text. Defaults to 0.
        added: Int or float, added to the batch size, such as an example of the
            model's own. Defaults to 0.
    """

    def at(self, batch_size, sequence_length):
        """Returns the bytes for a batch size and a sequence length."""
        size = self.coefficient
        if self.batch:
            size *= (batch_size + self.added) ** self.batch
        if self.length:
            size *= (sequence_length + self.offset) ** self.length
        return _short(size)

    def listed(self):
        """Returns a list of the fields, without zeros at the end."""
        fields = list(self)
        while len(fields) > 3 and not fields[-1]:
            fields.pop()
        return fields


def size_of(value, graph):
    """Returns the `Size` of a `Value`.

    The placeholder sizes of batch and length are primes that divide no known
    dim, so a dim says how it grows. Dims that are made of such a dim and others
    are in `Graph.lengths` and `Graph.batches`. Only a dim of exactly the size
    of the batch is one, if there are any; else the first that it divides has it
    as a factor.
    """
    dims = [(value, i) for i in range(value.ndim)]
    return size_of_dims(dims, item_bytes(value.dtype), graph)


def size_of_dims(dims, coefficient, graph):
    """Returns the `Size` of a tensor with dims of `Value`s; see `size_of`.

    Args:
        dims: List of pairs of a `Value` and the index of its dim.
        coefficient: Int, bytes of one element.
        graph: `Graph`.
    """
    batch = length = offset = added = 0
    sizes = [value.shape[i] for value, i in dims]
    for (value, i), size in zip(dims, sizes):
        times, rest = graph.lengths.get((value.index, i), (0, 0))
        if times:
            length, offset = length + 1, rest / times
            coefficient *= times
            continue
        times, rest = graph.batches.get((value.index, i), (0, 0))
        if times:
            batch, added = batch + 1, rest / times
            coefficient *= times
            continue
        is_factor = not batch and graph.batch not in sizes
        if size == graph.batch or (
            is_factor and size and size % graph.batch == 0
        ):
            size //= graph.batch
            batch += 1
        while size and size % graph.length == 0:
            size //= graph.length
            length += 1
        coefficient *= size
    return Size(
        _short(coefficient), batch, length, _short(offset), _short(added)
    )


def _short(number):
    """Returns a number as an int, if it is whole."""
    is_whole = isinstance(number, float) and number.is_integer()
    return int(number) if is_whole else number


def item_bytes(dtype):
    """Returns the bytes of one element: 1 for a boolean, 0 for a string."""
    if dtype == "string":
        # Strings stay on the host.
        return 0
    return max(dtype_size(dtype) // 8, 1)
