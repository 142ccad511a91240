"""Finds attention in a graph, and how many bytes of its scores are stored.

Attention of 16 bits is one kernel on GPUs, which computes its scores again. The
operations between two products are the same attention, written out.
"""

import collections
import math

from keras_tp.distribution.planning import cost
from keras_tp.distribution.planning.graph import CONSTANT
from keras_tp.distribution.planning.graph import VARIABLE
from keras_tp.distribution.planning.rules import rule_for
from keras_tp.distribution.planning.rules_math import elementwise

PRODUCTS = ("Einsum", "Matmul", "Dot", "Tensordot")
KERNEL = "DotProductAttention"
_SOFTMAX = "Softmax"
_VIEWS = ("Reshape", "ExpandDims", "Squeeze")
_HALF = ("float16", "bfloat16")
_FLOAT32 = 4
# Of cuDNN's kernel on H100.
_LARGEST_HEAD = 256
_MULTIPLE_OF_HEAD = 8
# Between the product of queries and keys and the softmax.
_MOST_STEPS = 8


class Scores(collections.namedtuple("Scores", "inside dims value step nbytes")):
    """The scores of one attention.

    Args:
        inside: Set of the indices of the `Value`s between its products.
        dims: List of pairs of a `Value` and a dim, the dims of the scores.
        value: `Value` that is split as they are.
        step: `Step` in the attention.
        nbytes: Int, bytes that are stored for each score.
    """


def find(graph, made_by, read_by, learns):
    """Returns the list of `Scores` of a graph.

    Args:
        graph: `Graph`.
        made_by: Dict of the index of a value to the `Step` that makes it.
        read_by: Dict of the index of a value to the `Step`s that read it.
        learns: Set of the indices of the values that have a gradient.
    """
    dropped = {value.index for value in graph.dropped}
    found = []
    for step in graph.steps:
        if step.kind == KERNEL:
            found.append(_of_kernel(step, graph))
        elif step.kind == _SOFTMAX:
            inside, product, biased = _before(step.inputs[0], made_by, learns)
            after, is_dropped = _after(step.outputs[0], read_by, dropped)
            if product is None or after is None:
                continue
            value = step.outputs[0]
            is_kernel = not (biased or is_dropped) and _has_kernel(
                product.inputs[0],
                value.shape[-2:],
                product.outputs[0].dtype,
                graph,
            )
            item = cost.item_bytes(product.outputs[0].dtype)
            # Exponentials of float32 and the probabilities, or the scores, what
            # is left of the probabilities, and where some were dropped.
            nbytes = 2 * item + 1 if is_dropped else _FLOAT32 + item
            dims = [(value, i) for i in range(value.ndim)]
            found.append(
                Scores(
                    inside | after,
                    dims,
                    value,
                    step,
                    0 if is_kernel else nbytes,
                )
            )
    return found


def _of_kernel(step, graph):
    query, key = step.inputs[:2]
    lengths = query.shape[1], key.shape[1]
    nbytes = _FLOAT32 + cost.item_bytes(query.dtype)
    if _has_kernel(query, lengths, query.dtype, graph):
        nbytes = 0
    dims = [(query, 0), (query, 2), (query, 1), (key, 1)]
    return Scores(set(), dims, query, step, nbytes)


def _has_kernel(operand, lengths, dtype, graph):
    """Returns whether one kernel computes attention; see `Scores`."""
    head = operand.shape[-1]
    # Unknown lengths have a prime as their size.
    known = [n for n in lengths if n % graph.length]
    return (
        dtype in _HALF
        and head <= _LARGEST_HEAD
        and head % _MULTIPLE_OF_HEAD == 0
        and not any(n % 2 for n in known)
    )


def _before(value, made_by, learns, most=_MOST_STEPS):
    """Follows scores back to the product of queries and keys.

    Returns:
        A set of indices, the product or `None`, and whether something that
        learns was added.
    """
    step = made_by.get(value.index)
    if step is None:
        return set(), None, False
    if step.kind in PRODUCTS:
        is_weighted = any(x.kind == VARIABLE for x in step.inputs)
        return {value.index}, None if is_weighted else step, False
    if not (most and is_again(step)):
        return set(), None, False
    learned = [x for x in step.inputs if x.index in learns]
    for x in learned:
        if math.prod(x.shape) == math.prod(value.shape):
            inside, product, biased = _before(x, made_by, learns, most - 1)
            if product is not None:
                biased = biased or len(learned) > 1
                return inside | {value.index}, product, biased
    return set(), None, False


def _after(value, read_by, dropped):
    """Follows probabilities to their product with the values.

    Returns:
        A set of indices, or `None`, and whether some are dropped.
    """
    inside, is_dropped = {value.index}, False
    while True:
        is_dropped = is_dropped or value.index in dropped
        readers = read_by[value.index]
        if len(readers) != 1:
            return None, is_dropped
        (step,) = readers
        if step.kind in PRODUCTS:
            is_weighted = any(
                x.kind in (VARIABLE, CONSTANT) for x in step.inputs
            )
            return None if is_weighted else inside, is_dropped
        if not is_again(step):
            return None, is_dropped
        (value,) = step.outputs
        inside.add(value.index)


def is_again(step):
    """Returns whether a step is computed again rather than stored."""
    is_view = step.kind in _VIEWS
    return not step.is_leaf and (is_view or rule_for(step) is elementwise)
