"""Matrix products that DTensor cannot split as TensorFlow writes them."""

import math
import string

import tensorflow as tf
from tensorflow.experimental import dtensor

from keras_tp.backend.tensorflow import placement
from keras_tp.backend.tensorflow.ops import sequence


def matmul(original, a, b, *args, output_type=None, **kwargs):
    """Multiplies small integers in the type of the result.

    This is exact too. DTensor has no expansion of `BatchMatMulV3`, which takes
    them as they are. If the ranks differ, the contracted dims are split alike.
    A product by one matrix is one product for all of the batch: the gradient of
    a batched one has a copy of the matrix for each example, and adds them up.
    """
    if output_type is not None:
        a, b = tf.cast(a, output_type), tf.cast(b, output_type)
    found = None if args or kwargs else sequence.matmul(a, b)
    if found is not None:
        return found
    if not args and not kwargs:
        found = _with_shared_matrices(a, b)
        if found is not None:
            return found
    b = _weight_of_one_axis(b)
    ranks = [len(getattr(x, "shape", ())) for x in (a, b)]
    if min(ranks) > 1 and ranks[0] != ranks[1] and not args and not kwargs:
        a, b = tf.convert_to_tensor(a), tf.convert_to_tensor(b)
        b = _summed_as(a, b)
        if ranks[1] == 2:
            return _times_matrix(tf.tensordot, a, b)
    return original(a, b, *args, **kwargs)


def _with_shared_matrices(a, b):
    """Multiplies batches of matrices by matrices that examples share.

    As of relative positions, (1, heads, ...). If a device has one head,
    TensorFlow's product of such batches reads and writes other memory
    (https://github.com/tensorflow/tensorflow/issues/117700). `einsum` is right.

    Args:
        a: Tensor of shape (..., M, K).
        b: Tensor of shape (..., K, N), with dims of size 1 where `a` has more.

    Returns:
        The product; `None` for other shapes.
    """
    a, b = tf.convert_to_tensor(a), tf.convert_to_tensor(b)
    if a.shape.rank is None or b.shape.rank is None or a.dtype != b.dtype:
        return None
    count = a.shape.rank - 2
    absent = a.shape.rank - b.shape.rank
    if count < 2 or absent < 0 or b.shape.rank < 3 or not a.dtype.is_floating:
        return None
    sizes = [1] * absent + list(b.shape[:-2])
    pairs = list(zip(a.shape[:-2], sizes))
    if any(of_b is None or of_b not in (1, of_a) for of_a, of_b in pairs):
        return None
    if all(of_a == of_b for of_a, of_b in pairs):
        return None
    letters = string.ascii_lowercase[:count]
    kept = "".join(x for x, size in zip(letters, sizes) if size != 1)
    ones = [i for i, size in enumerate(b.shape[:-2]) if size == 1]
    if ones:
        b = tf.squeeze(b, ones)
    return tf.einsum(f"{letters}yz,{kept}zK->{letters}yK", a, b)


def _weight_of_one_axis(x):
    """Gathers a matrix that the batch axis splits, or two axes, along one.

    A product of DTensor has one split dim at most, and cannot split another
    one over the batch axis, as in a fully sharded model.
    """
    specs = placement.specs_of(x)
    if specs is None or not len(specs) == len(x.shape) == 2:
        return x
    batch = placement.batch_axis()
    if batch not in specs and dtensor.UNSHARDED in specs:
        return x
    gathered = batch if batch in specs else specs[0]
    wanted = [dtensor.UNSHARDED if s == gathered else s for s in specs]
    layout = dtensor.Layout(wanted, placement.current_mesh())
    return dtensor.relayout(tf.convert_to_tensor(x), layout)


def _summed_as(a, b):
    """Splits the contracted dim of `b` like the contracted dim of `a`."""
    specs = [placement.specs_of(x) for x in (a, b)]
    if any(s is None or len(s) != len(x.shape) for s, x in zip(specs, (a, b))):
        return b
    axis = specs[0][-1]
    if axis in (dtensor.UNSHARDED, specs[1][-2]):
        return b
    wanted = [dtensor.UNSHARDED if s == axis else s for s in specs[1]]
    wanted[-2] = axis
    mesh = placement.current_mesh()
    return dtensor.relayout(b, dtensor.Layout(wanted, mesh))


def tensordot(original, a, b, axes, name=None):
    """Multiplies by a matrix without merging the other dims.

    TensorFlow merges them, and DTensor then gathers a split inner dim. With
    LoRA on an attention kernel this would be the heads dim, in the first factor
    or in its product with the inputs.
    """
    if axes == [[-1], [0]]:
        found = sequence.matmul(a, b)
        if found is not None:
            return found
        b = _weight_of_one_axis(b)
    if axes != [[-1], [0]] or len(b.shape) != 2:
        return original(a, b, axes, name)
    return _times_matrix(original, a, b, name)


def _times_matrix(tensordot, a, b, name=None):
    if not _may_be_split_within(a):
        return tensordot(a, b, [[-1], [0]], name)
    letters = string.ascii_letters[: len(a.shape) - 1]
    return tf.einsum(f"{letters}y,yz->{letters}z", a, b)


def einsum(original, equation, *inputs, **kwargs):
    """Spells out `...`, and merges the contracted dims into one.

    DTensor broadcasts `...` only if all inputs have equally many dims. If a
    product contracts several dims and its inputs are split along different
    ones, DTensor adds up parts that do not belong together.
    """
    inputs = [tf.convert_to_tensor(x) for x in inputs]
    if "..." in equation:
        equation = _spelled_out(equation, [len(x.shape) for x in inputs])
    if len(inputs) == 2 and "->" in equation and "..." not in equation:
        found = sequence.product(equation.replace(" ", ""), *inputs)
        if found is not None:
            return found
        equation, inputs = _summed_over_one(equation.replace(" ", ""), inputs)
    return original(equation, *inputs, **kwargs)


def _summed_over_one(equation, inputs):
    """Returns an equation and its inputs with the contracted dims merged.

    The merged dim keeps a split of its first part. Dims that a weight is split
    along come first.
    """
    terms, _, result = equation.partition("->")
    terms = terms.split(",")
    shared = [x for x in terms[0] if x in terms[1] and x not in result]
    if len(shared) < 2 or any(len(set(term)) < len(term) for term in terms):
        return equation, inputs
    split = _split_letters(inputs, terms)
    shared.sort(key=lambda letter: letter not in split)
    if any(None in x.shape for x in inputs):
        return equation, inputs
    if terms[0] == terms[1]:
        return f"{terms[0]}->{result}", [inputs[0] * inputs[1]]
    one = next(x for x in string.ascii_letters if x not in equation)
    merged = [_merged(x, term, shared, one) for x, term in zip(inputs, terms)]
    terms, inputs = zip(*merged)
    return f"{','.join(terms)}->{result}", inputs


def _merged(x, term, shared, one):
    """Merges the dims `shared` of a tensor; returns its letters and itself."""
    others = [letter for letter in term if letter not in shared]
    count = math.prod(x.shape[term.index(letter)] for letter in shared)
    sizes = [x.shape[term.index(letter)] for letter in others]
    if list(term) == others + shared:
        return "".join(others) + one, tf.reshape(x, [*sizes, count])
    order = [term.index(letter) for letter in shared + others]
    if order != sorted(order):
        x = tf.transpose(x, order)
    return one + "".join(others), tf.reshape(x, [count, *sizes])


def _split_letters(inputs, terms):
    """Returns the letters of the dims that weights are split along."""
    return {
        letter
        for x, term in zip(inputs, terms)
        for letter, axis in zip(term, placement.specs_of(x) or ())
        if axis != dtensor.UNSHARDED
    }


def _spelled_out(equation, ranks):
    equation = equation.replace(" ", "")
    terms = equation.partition("->")[0].split(",")
    extra = [
        rank - len(term.replace("...", ""))
        for term, rank in zip(terms, ranks)
        if "..." in term
    ]
    if "->" not in equation or len(set(extra)) > 1:
        # Needs broadcasting, or has an implicit order of the result.
        return equation
    unused = [x for x in string.ascii_letters if x not in equation]
    return equation.replace("...", "".join(unused[: extra[0]]))


def _may_be_split_within(a):
    specs = placement.specs_of(a)
    if specs is None:
        # The middle dim of three is a sequence, assumed to be whole.
        return len(a.shape) > 3
    return any(axis != dtensor.UNSHARDED for axis in specs[1:-1])


def repeat(original, x, repeats, axis=None):
    """Repeats KV heads that stay whole, with one product as the gradient.

    TensorFlow's gradient reshapes the dim into groups. If a mesh axis divides
    the query heads but not the KV heads, groups lie on several devices, and
    DTensor gathers all of them.
    """
    x = tf.convert_to_tensor(x)
    if (
        not isinstance(repeats, int)
        or axis is None
        or not x.dtype.is_floating
        or not _only_repeated_divides(x.shape[axis], repeats)
    ):
        return original(x, repeats, axis)
    axis %= len(x.shape)
    size = x.shape[axis]

    @placement.custom_gradient
    def repeated(x):
        def gradient(dy):
            group = tf.range(size * repeats) // repeats
            is_of = group[:, None] == tf.range(size)[None, :]
            letters = string.ascii_letters[: len(x.shape)]
            y, z = letters[axis], "Z"
            return tf.einsum(
                f"{letters},{y}{z}->{letters.replace(y, z)}",
                dy,
                tf.cast(is_of, dy.dtype),
            )

        return original(x, repeats, axis), gradient

    return repeated(x)


def _only_repeated_divides(size, repeats):
    return size is not None and any(
        size % count and size * repeats % count == 0
        for count in placement.current_mesh().shape()
    )
