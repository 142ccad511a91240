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


def _may_be_split_within(a):
    specs = placement.specs_of(a)
    if specs is None:
        # Of inputs of three dims, the middle one is a sequence's.
        return len(a.shape) > 3
    return any(axis != dtensor.UNSHARDED for axis in specs[1:-1])


RULES = [
    ("tensorflow", "matmul", matmul, "DTensor has no BatchMatMulV3"),
    ("tensorflow", "tensordot", tensordot, "DTensor gathers what is joined"),
]
