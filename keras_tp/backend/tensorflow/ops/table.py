"""Rules for operations that DTensor cannot run, or not correctly.

On a mesh, each rule replaces a public function of TensorFlow, so that Keras,
KerasHub and a user's own code use it, or a function of Keras's backend.
"""

import functools

import tensorflow as tf
from tensorflow.experimental import dtensor

from keras_tp.backend.hooks import Hook
from keras_tp.backend.tensorflow import placement
from keras_tp.backend.tensorflow.ops import conv
from keras_tp.backend.tensorflow.ops import ctc
from keras_tp.backend.tensorflow.ops import embedding
from keras_tp.backend.tensorflow.ops import generation
from keras_tp.backend.tensorflow.ops import matmul
from keras_tp.backend.tensorflow.ops import random
from keras_tp.backend.tensorflow.ops import shape_ops
from keras_tp.backend.tensorflow.ops import sorting


def _on_mesh(rule):
    """Returns a hook that runs the rule on a mesh, the original elsewhere."""

    def hook(original):
        @functools.wraps(original)
        def function(*args, **kwargs):
            if placement.current_mesh() is not None:
                return rule(original, *args, **kwargs)
            # Off the mesh the original is right for a trace, which only infers
            # shapes, and for a variable, which is read whole.
            for x in args if tf.executing_eagerly() else ():
                is_variable = isinstance(x, dtensor.DVariable)
                if placement.is_dtensor(x) and not is_variable:
                    with placement.on_mesh(dtensor.fetch_layout(x).mesh):
                        return rule(original, *args, **kwargs)
            return original(*args, **kwargs)

        return function

    return hook


def _static(value, what):
    """Returns a shape as ints; raises `ValueError` if it is not known."""
    if isinstance(value, (list, tuple)):
        found = [tf.get_static_value(size) for size in value]
        found = None if None in found else found
    else:
        found = tf.get_static_value(value)
    if found is None:
        raise ValueError(
            f"Under a distribution, {what} needs a shape that is known when "
            "the step is traced. Give the dims as ints, or take them from "
            f"`x.shape`. Received: shape={value}"
        )
    return tuple(int(size) for size in found)


# --- composed of operations that DTensor splits -----------------------------


def band_part(original, input, num_lower, num_upper, name=None):  # noqa: A002
    """Selects the band by a comparison of row and column indices."""
    input = tf.convert_to_tensor(input)  # noqa: A001
    rows, columns = input.shape[-2:]
    below = tf.range(rows)[:, None] - tf.range(columns)[None, :]
    lower = tf.cast(num_lower, tf.int32)
    upper = tf.cast(num_upper, tf.int32)
    kept = tf.logical_and(
        tf.logical_or(lower < 0, below <= lower),
        tf.logical_or(upper < 0, -below <= upper),
    )
    return tf.where(kept, input, tf.zeros([], input.dtype))


def diag_part(original, input, *args, **kwargs):  # noqa: A002
    """Sets all but the diagonal to zero and sums each row."""
    if args or {k: v for k, v in kwargs.items() if k != "name" and v != 0}:
        raise ValueError(
            "Under a distribution, `tf.linalg.diag_part` takes the main "
            f"diagonal only. Received: {args} {kwargs}"
        )
    input = tf.convert_to_tensor(input)  # noqa: A001
    rows, columns = input.shape[-2:]
    size = min(rows, columns)
    input = input[..., :size, :size]  # noqa: A001
    kept = tf.range(size)[:, None] == tf.range(size)[None, :]
    return tf.reduce_sum(tf.where(kept, input, tf.zeros([], input.dtype)), -1)


def diag(original, diagonal, *args, **kwargs):
    """Broadcasts the values over columns and keeps the diagonal."""
    if args or {k: v for k, v in kwargs.items() if k != "name" and v != 0}:
        raise ValueError(
            "Under a distribution, `tf.linalg.diag` makes the main diagonal "
            f"only. Received: {args} {kwargs}"
        )
    diagonal = tf.convert_to_tensor(diagonal)
    size = diagonal.shape[-1]
    kept = tf.range(size)[:, None] == tf.range(size)[None, :]
    return tf.where(kept, diagonal[..., None], tf.zeros([], diagonal.dtype))


def one_hot(
    original,
    indices,
    depth,
    on_value=None,
    off_value=None,
    axis=None,
    dtype=None,
    name=None,
):
    """Compares the indices, which may be split, with all class numbers."""
    indices = tf.convert_to_tensor(indices)
    on = tf.convert_to_tensor(1 if on_value is None else on_value)
    off = tf.convert_to_tensor(0 if off_value is None else off_value)
    if dtype is None:
        dtype = tf.float32 if on_value is None else on.dtype
    axis = len(indices.shape) if axis in (None, -1) else axis
    shape = [1] * (len(indices.shape) + 1)
    shape[axis] = -1
    numbers = tf.reshape(tf.range(tf.cast(depth, indices.dtype)), shape)
    return tf.where(
        tf.expand_dims(indices, axis) == numbers,
        tf.cast(on, dtype),
        tf.cast(off, dtype),
    )


def softsign(original, features, name=None):
    """Computes the formula: DTensor has no expansion of its gradient."""
    x = tf.convert_to_tensor(features)
    return x / (1 + tf.abs(x))


def scatter_nd(original, indices, updates, shape, name=None):
    """Casts indices to int32, because DTensor always makes int32 shapes."""
    indices = tf.cast(indices, tf.int32)
    return original(indices, updates, tf.cast(shape, tf.int32), name)


# --- random numbers ---------------------------------------------------------


def stateless_uniform(
    original,
    shape,
    seed,
    minval=0,
    maxval=None,
    dtype=tf.float32,
    name=None,
    alg="auto_select",
):
    """Returns the same numbers on any mesh as on one device."""
    shape = _static(shape, "a random tensor")
    dtype = tf.as_dtype(dtype)
    if dtype == tf.int32 and maxval is not None:
        return random.integers(shape, seed, minval, maxval)
    if not random.supports(dtype):
        _refuse_random(f"uniform numbers of dtype {dtype.name}")
    maxval = 1 if maxval is None else maxval
    minval, maxval = tf.cast(minval, dtype), tf.cast(maxval, dtype)
    return random.uniform(shape, seed, dtype) * (maxval - minval) + minval


def stateless_normal(
    original,
    shape,
    seed,
    mean=0.0,
    stddev=1.0,
    dtype=tf.float32,
    name=None,
    alg="auto_select",
):
    """Returns the same numbers on any mesh as on one device."""
    dtype = tf.as_dtype(dtype)
    if dtype != tf.float32:
        _refuse_random(f"normal numbers of dtype {dtype.name}")
    shape = _static(shape, "a random tensor")
    numbers = random.normal(shape, seed, dtype)
    return numbers * tf.cast(stddev, dtype) + tf.cast(mean, dtype)


def stateless_dropout(
    original,
    x,
    rate,
    seed,
    rng_alg="auto_select",
    noise_shape=None,
    name=None,
):
    """Applies a mask from `stateless_uniform` as TensorFlow does."""
    x = tf.convert_to_tensor(x)
    shape = tf.shape(x) if noise_shape is None else noise_shape
    if isinstance(shape, (list, tuple)):
        # Keras has replaced `None` by a tensor, the size of that dim of `x`.
        static = [tf.get_static_value(size) for size in shape]
        shape = [s if s is not None else d for s, d in zip(static, x.shape)]
    numbers = stateless_uniform(
        None, _static(shape, "dropout"), seed, dtype=x.dtype
    )
    kept = numbers >= tf.cast(rate, x.dtype)
    scaled = x * tf.cast(1 / (1 - rate), x.dtype)
    return tf.where(kept, scaled, tf.zeros([], x.dtype))


def _refuse_random(what):
    raise NotImplementedError(
        f"keras_tp has no rule for {what} under a distribution on TensorFlow: "
        "DTensor's own would depend on the devices. Draw them in the data "
        "pipeline and pass them to the model as an input, or use uniform "
        f"or normal numbers of float32. Received: {what}"
    )


def _refused(name):
    def rule(original, *args, **kwargs):
        _refuse_random(f"`tf.random.{name}`")

    return rule


# --- recurrent layers -------------------------------------------------------


def rnn(original, *args, **kwargs):
    """Unrolls the loop: DTensor has no expansion of its tensor lists."""
    names = ("step_function", "inputs", "initial_states", "go_backwards")
    names += ("mask", "constants", "unroll")
    kwargs.update(zip(names, args))
    kwargs["unroll"] = True
    return original(**kwargs)


def decline(original, *args, **kwargs):
    """Declines the fused kernel: the layer then computes step by step."""
    raise NotImplementedError


_MASKS = "random numbers are those of one device on every mesh"

_RULES = [
    *ctc.RULES,
    *shape_ops.RULES,
    ("tensorflow", "scatter_nd", scatter_nd, "DTensor wants int32 indices"),
    ("tensorflow:linalg", "band_part", band_part, "DTensor has none"),
    ("tensorflow:linalg", "diag_part", diag_part, "DTensor has none"),
    ("tensorflow:linalg", "diag", diag, "DTensor has none"),
    *generation.RULES,
    *conv.RULES,
    *embedding.RULES,
    *matmul.RULES,
    *sorting.RULES,
    ("tensorflow:nn", "softsign", softsign, "DTensor has no SoftsignGrad"),
    ("tensorflow", "one_hot", one_hot, "DTensor wants whole indices"),
    (
        "tensorflow:nn.experimental",
        "stateless_dropout",
        stateless_dropout,
        _MASKS,
    ),
    *(
        ("tensorflow:random", name, rule, _MASKS)
        for name, rule in {
            "stateless_uniform": stateless_uniform,
            "stateless_normal": stateless_normal,
            "stateless_truncated_normal": _refused(
                "stateless_truncated_normal"
            ),
            "stateless_gamma": _refused("stateless_gamma"),
            "stateless_binomial": _refused("stateless_binomial"),
        }.items()
    ),
    ("keras.src.backend", "rnn", rnn, "recurrent layers are unrolled"),
    *(
        ("keras.src.backend", name, decline, "cells compute, no fused kernel")
        for name in ("lstm", "gru")
    ),
]

TABLE = [
    Hook(owner, name, _on_mesh(rule), why) for owner, name, rule, why in _RULES
]
