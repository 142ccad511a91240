"""Products that DTensor cannot split, or not as TensorFlow writes them."""

import string

import tensorflow as tf
from tensorflow.experimental import dtensor

from keras_tp.backend.tensorflow import placement


def matmul(original, a, b, *args, output_type=None, **kwargs):
    """Of small integers, in the type of the result.

    That is exact too; DTensor has no expansion of the operation that takes
    them as they are, `BatchMatMulV3`.
    """
    if output_type is not None:
        a, b = tf.cast(a, output_type), tf.cast(b, output_type)
    return original(a, b, *args, **kwargs)


def tensordot(original, a, b, axes, name=None):
    """With a matrix: the other dims stay apart.

    TensorFlow joins them, and DTensor gathers what is split within: heads, of
    LoRA's first factor of their kernel or of what that makes of the inputs.
    """
    if axes != [[-1], [0]] or len(b.shape) != 2 or not _may_be_split_within(a):
        return original(a, b, axes, name)
    letters = string.ascii_letters[: len(a.shape) - 1]
    return tf.einsum(f"{letters}y,yz->{letters}z", a, b)


def einsum(original, equation, *inputs, **kwargs):
    """With a letter for each dim that `...` stands for.

    DTensor expands it itself only where all inputs have as many dims.
    """
    inputs = [tf.convert_to_tensor(x) for x in inputs]
    if "..." in equation:
        equation = _spelled_out(equation, [len(x.shape) for x in inputs])
    return original(equation, *inputs, **kwargs)


def _spelled_out(equation, ranks):
    equation = equation.replace(" ", "")
    terms, _, result = equation.partition("->")
    terms = terms.split(",")
    extra = [
        rank - len(term.replace("...", ""))
        for term, rank in zip(terms, ranks)
        if "..." in term
    ]
    unused = [x for x in string.ascii_letters if x not in equation]
    dims = unused[: max(extra)]
    if "->" not in equation or len(set(extra)) > 1:
        # Broadcast, or an order of the result that follows from the letters.
        return equation
    return equation.replace("...", "".join(dims))


def _may_be_split_within(a):
    specs = placement.specs_of(a)
    if specs is None:
        # Of inputs of three dims, the middle one is a sequence's.
        return len(a.shape) > 3
    return any(axis != dtensor.UNSHARDED for axis in specs[1:-1])


def repeat(original, x, repeats, axis=None):
    """Heads of keys that stay whole: their gradient is one sum.

    TensorFlow takes the gradient's dim apart again. Where the queries' heads
    are split over more devices than there are heads to repeat, no device has a
    whole group, and DTensor gathers all of them.
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


RULES = [
    (
        "keras.src.backend.tensorflow.numpy",
        "repeat",
        repeat,
        "DTensor gathers the gradient of heads that stay whole",
    ),
    ("tensorflow", "matmul", matmul, "DTensor has no BatchMatMulV3"),
    ("tensorflow", "einsum", einsum, "DTensor broadcasts no ellipsis"),
    ("tensorflow", "tensordot", tensordot, "DTensor gathers what is joined"),
]
