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

# Operations whose inputs or outputs the backward pass needs.
_KEEPS_INPUTS = {
    "Einsum",
    "Matmul",
    "Conv",
    "ConvTranspose",
    "DepthwiseConv",
    "SeparableConv",
    "Multiply",
    "LayerNorm",
    "RMSNorm",
    "BatchNorm",
    "Gelu",
    "Silu",
    "Square",
    "DotProductAttention",
}
_KEEPS_OUTPUTS = {"Softmax", "Relu", "ReLU", "Sigmoid", "Tanh", "Exp", "Rsqrt"}


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
    coefficient = item_bytes(value.dtype)
    batch = length = offset = added = 0
    for i, size in enumerate(value.shape):
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
        is_factor = not batch and graph.batch not in value.shape
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


def kept_activations(graph, split_dim, count):
    """Estimates the bytes that the forward pass keeps for the backward pass.

    Counts once each activation that the gradients of products, normalizations
    and nonlinear functions need. A compiler may keep or recompute others.

    Args:
        graph: `Graph`.
        split_dim: Function of a `Value` that returns its split dim, or `None`.
        count: Int, number of devices along the axis that splits variables.

    Returns:
        List of `Size` in bytes on one device, one for each way to grow.
    """
    kept = {}
    for step in graph.steps:
        if step.kind in _KEEPS_INPUTS or step.is_leaf:
            kept.update({v.index: v for v in step.inputs})
        if step.kind in _KEEPS_OUTPUTS or step.is_leaf:
            kept.update({v.index: v for v in step.outputs})
    total = collections.Counter()
    for value in kept.values():
        if value.kind in ("variable", "constant"):
            continue
        coefficient, *growth = size_of(value, graph)
        if growth[0] == 0:
            # A value without a batch dim depends on no input.
            continue
        share = 1 if split_dim(value) is None else count
        total[tuple(growth)] += coefficient // share
    return [Size(total[key], *key) for key in sorted(total)]
