"""Products and lookups whose activations are split along the sequence.

See `backend/sequence_parallel.py`. DTensor finds the layouts of activations
when it compiles a step. So a product cannot ask whether its input is split. It
finds the variable that its weight was read from, whose layout has the flag.
Eagerly, this is not known: activations stay whole, as without the flag.
"""

import math
import string

import tensorflow as tf
from tensorflow.experimental import dtensor
from tensorflow.python import pywrap_tfe

from keras_tp.backend import sequence_parallel
from keras_tp.backend.tensorflow import placement

# The scope of sums that `scattered` follows. Collectives are counted by it.
SCATTERED = "keras_tp_reduce_scatter"
# Elementwise operations; an input of the same shape is split alike.
_ELEMENTWISE = ("Add", "AddV2", "Cast", "Identity")


# TensorFlow's own: this module is imported before the rules are set.
_einsum = tf.einsum


def matmul(a, b):
    """Multiplies a batch of sequences by a matrix; see `product`."""
    ranks = [len(getattr(x, "shape", ())) for x in (a, b)]
    if ranks != [3, 2]:
        return None
    return product("abc,cd->abd", tf.convert_to_tensor(a), b)


def product(equation, x, weight):
    """Computes a product with a weight whose layout has the flag.

    A column-parallel product gathers its input: one all-gather. A row-parallel
    product splits its sum over the devices: one reduce-scatter.

    Args:
        equation: String, an equation for `einsum` with two inputs.
        x: Tensor of shape `(batch, sequence, ...)`.
        weight: Tensor.

    Returns:
        Tensor, or `None` if this is not such a product.
    """
    found = _flagged(weight)
    if found is None or not x.dtype.is_floating or None in x.shape[2:]:
        return None
    inputs, _, result = equation.partition("->")
    terms = inputs.split(",")
    if not _is_product(*terms, result):
        return None
    layout, dim = found
    split = terms[1][dim]
    if split in result:
        axis = sequence_parallel.axis_of(layout, tuple(x.shape))
        if axis is not None and split not in terms[0]:
            return _column_product(terms, result, x, weight, layout, dim)
    elif split in terms[0]:
        sizes = dict(zip(terms[1] + terms[0], [*weight.shape, *x.shape]))
        shape = tuple(sizes[letter] for letter in result)
        axis = sequence_parallel.axis_of(layout, shape)
        if axis is not None:
            return _row_product(terms, result, x, weight, axis)
    return None


def _is_product(first, second, result):
    """Returns whether an equation keeps a batch of sequences.

    Its derivatives are products too: each letter is in two of the three terms.
    """
    terms = first + second + result
    return first[:2] == result[:2] and all(
        terms.count(letter) == 2 for letter in terms
    )


def scattered(x, axis):
    """Splits a sum over the devices along the sequence.

    DTensor makes one reduce-scatter of both if the sum comes just before. A CPU
    has none, and a GPU only with `DTENSOR_GPU_USE_NCCL_COMMUNICATION=1`: they
    all-reduce, and each device keeps its part.
    """
    return _with_sequence(x, axis)


def summed(x):
    """Adds up the first dim, before `scattered`."""
    with tf.name_scope(SCATTERED):
        return tf.reduce_sum(x, 0)


def gathered(x):
    """Gathers a tensor that is split along the sequence."""
    return _with_sequence(x, dtensor.UNSHARDED)


def _with_sequence(x, axis):
    specs = [dtensor.MATCH, axis, dtensor.UNSHARDED]
    return dtensor.relayout(x, dtensor.Layout(specs, placement.current_mesh()))


def _row_product(terms, result, x, weight, axis):
    """Splits the sum over the devices; see `scattered`.

    The gradient is computed here: `tf.custom_gradient` puts an identity before
    and after its function, so `scattered` has to be in the same one.
    """

    @placement.custom_gradient
    def multiply(x, weight):
        def gradient(dy):
            dy = gathered(dy)
            dx = _einsum(f"{result},{terms[1]}->{terms[0]}", dy, weight)
            return dx, _einsum(f"{terms[0]},{result}->{terms[1]}", x, dy)

        with tf.name_scope(SCATTERED):
            y = _einsum(f"{terms[0]},{terms[1]}->{result}", x, weight)
        return scattered(y, axis), gradient

    return multiply(x, weight)


def _column_product(terms, result, x, weight, layout, dim):
    """Multiplies the gathered input; each device has its columns.

    The devices are a dim of the input and of the weight. So the gradients of
    all products of one input are added before the sum over the devices.
    """
    letter = terms[1][dim]
    new = next(c for c in string.ascii_letters if c not in terms[0] + terms[1])
    copies = _copies(x, layout)
    count = copies.shape[0]
    parts = tf.reshape(weight, _with_parts(weight.shape, dim, count))
    at = result.index(letter)
    y = _einsum(
        f"{new}{terms[0]},{terms[1].replace(letter, new + letter)}"
        f"->{result.replace(letter, new + letter)}",
        copies,
        parts,
    )
    shape = [-1, *y.shape[1:at], count * y.shape[at + 1], *y.shape[at + 2 :]]
    return tf.reshape(y, shape)


def _with_parts(shape, dim, count):
    return [*shape[:dim], count, shape[dim] // count, *shape[dim + 1 :]]


def _copies(x, layout):
    """Returns a copy of the whole input for each device, along a new first dim.

    All products of one input share the copies: one all-gather. The gradient is
    one reduce-scatter, or an all-reduce if the input is whole.
    """
    axis = sequence_parallel.axis_of(layout, x.shape)
    kept = getattr(x, "_sequence_copies", {}).get(axis)
    if kept is not None and _is_recorded_like(kept, x):
        return kept

    @placement.custom_gradient
    def copy(x):
        def gradient(dy):
            return dtensor.relayout_like(summed(dy), x)

        whole = tf.expand_dims(gathered(x), 0)
        # The product with split ones keeps the layout of the batch.
        specs = [axis] + [dtensor.UNSHARDED] * 3
        split = dtensor.Layout(specs, placement.current_mesh())
        ones = tf.ones((split.mesh.dim_size(axis), 1, 1, 1), x.dtype)
        return whole * placement.place(ones, split), gradient

    x._sequence_copies = {axis: copy(x)}
    return x._sequence_copies[axis]


def _is_recorded_like(kept, x):
    """Returns whether a tensor made of `x` has its gradient, in this graph.

    It has none for a tape that started after it was made, as in `keras.remat`.
    """
    tapes = pywrap_tfe.TFE_Py_TapeSetPossibleGradientTypes
    is_here = kept.graph is tf.compat.v1.get_default_graph()
    return is_here and tapes([kept]) == tapes([x])


def lookup_axis(table, shape):
    """Returns the mesh axis that splits the result of a lookup, or `None`.

    `shape` is that of the result.
    """
    found = _flagged(table)
    if found is None or found[1] != 0 or not table.dtype.is_floating:
        return None
    return sequence_parallel.axis_of(found[0], tuple(shape))


def _flagged(x):
    """Returns the flagged layout a tensor comes from, and its split dim.

    `None` for a tensor that does not come from a flagged variable.
    """
    if tf.executing_eagerly() or not hasattr(x, "op"):
        return None
    op = x.op
    if op.type == "ReadVariableOp":
        layout = getattr(_captured(op.inputs[0]), "_tensor_layout", None)
        if not getattr(layout, "sequence_parallel", False):
            return None
        # A `ShardedVariable` is gathered over the axis of the batch.
        axis = sequence_parallel.axis_of(layout, (0, 0, 0))
        if axis is None or {*layout.axes} - {
            None,
            axis,
            placement.batch_axis(),
        }:
            return None
        return layout, layout.axes.index(axis)
    for source in op.inputs:
        if op.type in _ELEMENTWISE and source.shape != x.shape:
            continue
        found = _flagged(source) if _is_view(op) else None
        if found is None:
            continue
        layout, dim = found
        if op.type == "Transpose":
            order = tf.get_static_value(op.inputs[1])
            return None if order is None else (layout, list(order).index(dim))
        if op.type in ("ExpandDims", "Reshape"):
            dim = _same_dim(source.shape, dim, x.shape)
            return None if dim is None else (layout, dim)
        return found
    return None


def _is_view(op):
    # A relayout gathers a fully sharded variable.
    views = ("ExpandDims", "Relayout", "Reshape", "Transpose")
    return op.type in (*_ELEMENTWISE, *views)


def _captured(inner):
    """Returns the tensor that an input of a graph stands for."""
    if not hasattr(inner, "graph") or hasattr(inner, "numpy"):
        return inner
    for outer, captured in getattr(inner.graph, "captures", ()):
        if captured is inner:
            return _captured(outer)
    return None


def _same_dim(before, dim, after):
    """Returns the dim that a split dim is, or is the first part of."""
    if None in before or None in after:
        return None
    first = math.prod(before[:dim])
    for i, size in enumerate(after):
        if math.prod(after[:i]) == first and size > 1:
            return i if size % before[dim] == 0 else None
    return None
