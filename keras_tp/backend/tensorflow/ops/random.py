"""TensorFlow's stateless random numbers, from operations DTensor can split.

DTensor draws different random numbers on each device, so they depend on the
mesh. Here int64 arithmetic computes the same generator, Philox 4x32 with 10
rounds (Salmon et al. 2011, section 5). The key and the counter come from the
seed as in TensorFlow, so any mesh gives the numbers that TensorFlow gives on
one device. Each int64 holds a number below 2**32.
"""

import math

import numpy as np
import tensorflow as tf

from keras_tp.backend.tensorflow import placement
from keras_tp.backend.tensorflow.ops import sorting

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
# The key that scrambles seeds, from TensorFlow's stateless_random_ops.
_SEED_KEY = (0x3EC8F720, 0x02461E29)
# How many bits of the significand TensorFlow fills with random bits.
_RANDOM_BITS = {"float32": 23, "bfloat16": 7, "float16": 10}
_SMALLEST = 1.0e-7


def _int64(value):
    return tf.constant(value, tf.int64)


def _low(x):
    return tf.bitwise.bitwise_and(x, _int64(_MASK))


def _high(x):
    # The shift copies the sign; the mask drops the copies.
    return _low(tf.bitwise.right_shift(x, _int64(32)))


def _generate(counter, key):
    """Runs Philox on four counters and two keys; returns four tensors."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    xor = tf.bitwise.bitwise_xor
    for i in range(_ROUNDS):
        if i:
            k0 = _low(k0 + _int64(_WEYL[0]))
            k1 = _low(k1 + _int64(_WEYL[1]))
        # The 64-bit product may wrap: only its bits matter.
        p0 = c0 * _int64(_MULTIPLIERS[0])
        p1 = c2 * _int64(_MULTIPLIERS[1])
        c0, c1, c2, c3 = (
            xor(xor(_high(p1), c1), k0),
            _low(p1),
            xor(xor(_high(p0), c3), k1),
            _low(p0),
        )
    return c0, c1, c2, c3


def _blocks(seed, count):
    """Returns `count` blocks of four random numbers of 32 bits."""
    seed = tf.cast(tf.convert_to_tensor(seed), tf.int64)
    mixed = _generate(
        (_low(seed[0]), _high(seed[0]), _low(seed[1]), _high(seed[1])),
        tuple(_int64(k) for k in _SEED_KEY),
    )
    index = tf.range(_int64(count), dtype=tf.int64)
    zero = tf.zeros_like(index)
    return _generate(
        (_low(index), _high(index), zero + mixed[2], zero + mixed[3]),
        mixed[:2],
    )


def _in_order(lanes, shape):
    """Interleaves the lanes, block after block, into a shape."""
    numbers = tf.stack(lanes, axis=-1)
    if numbers.shape[0] == 1 and placement.current_mesh() is not None:
        # Else DTensor may ask the concatenation for a split along its own dim.
        numbers = sorting.gathered(numbers, 1)
    flat = tf.reshape(numbers, [-1])
    return tf.reshape(flat[: math.prod(shape)], shape)


def _unit(x, dtype):
    """Converts random bits to numbers from 0 to 1, 1 excluded."""
    bits = _RANDOM_BITS[tf.as_dtype(dtype).name]
    x = tf.bitwise.bitwise_and(x, _int64(2**bits - 1))
    # Exact: the number has as many bits as the significand.
    return tf.cast(x, dtype) * tf.constant(2.0**-bits, dtype)


def uniform(shape, seed, dtype):
    """Returns the numbers of `tf.random.stateless_uniform` on one device."""
    lanes = _blocks(seed, -(-math.prod(shape) // 4))
    return _in_order([_unit(x, dtype) for x in lanes], shape)


def integers(shape, seed, low, high):
    """Returns int32 numbers from `low` to `high`, `high` excluded."""
    lanes = _blocks(seed, -(-math.prod(shape) // 4))
    low = tf.cast(low, tf.int64)
    span = tf.cast(high, tf.int64) - low
    lanes = [low + tf.math.floormod(x, span) for x in lanes]
    return tf.cast(_in_order(lanes, shape), tf.int32)


def long_integers(shape, seed, low, high):
    """Returns int64 numbers from `low` to `high`, at most 2**31 different."""
    a, b, c, d = _blocks(seed, -(-math.prod(shape) // 2))
    span = _int64(high - low)
    mod = tf.math.floormod
    # The remainder of 64 bits, from those of the upper and the lower ones.
    upper = mod(_int64(2**32), span)
    lanes = [
        _int64(low) + mod(mod(y, span) * upper + mod(x, span), span)
        for x, y in ((a, b), (c, d))
    ]
    return _in_order(lanes, shape)


def normal(shape, seed, dtype):
    """Returns the numbers of `tf.random.stateless_normal` on one device.

    Uses the transform of Box and Muller (1958), as TensorFlow does.
    """
    lanes = _blocks(seed, -(-math.prod(shape) // 4))
    numbers = []
    for a, b in (lanes[:2], lanes[2:]):
        u = tf.maximum(_unit(a, tf.float32), _SMALLEST)
        angle = _unit(b, tf.float32) * np.float32(2 * np.pi)
        radius = tf.sqrt(-2.0 * tf.math.log(u))
        numbers += [tf.sin(angle) * radius, tf.cos(angle) * radius]
    return tf.cast(_in_order(numbers, shape), dtype)


def stateless_uniform(
    original, shape, seed, minval=0, maxval=None, dtype=tf.float32, **unused
):
    """Returns the same numbers on any mesh as on one device."""
    shape = _static(shape, "a random tensor")
    dtype = tf.as_dtype(dtype)
    if dtype == tf.int32 and maxval is not None:
        return integers(shape, seed, minval, maxval)
    if dtype == tf.int64 and maxval is not None:
        low, high = map(tf.get_static_value, (minval, maxval))
        if None not in (low, high) and 0 < high - low <= 2**31:
            return long_integers(shape, seed, int(low), int(high))
    if dtype.name not in _RANDOM_BITS:
        _refuse(f"uniform numbers of dtype {dtype.name}")
    maxval = 1 if maxval is None else maxval
    minval, maxval = tf.cast(minval, dtype), tf.cast(maxval, dtype)
    return uniform(shape, seed, dtype) * (maxval - minval) + minval


def stateless_normal(
    original, shape, seed, mean=0.0, stddev=1.0, dtype=tf.float32, **unused
):
    """Returns the same numbers on any mesh as on one device."""
    dtype = tf.as_dtype(dtype)
    if dtype != tf.float32:
        _refuse(f"normal numbers of dtype {dtype.name}")
    numbers = normal(_static(shape, "a random tensor"), seed, dtype)
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
    """Applies a mask from `uniform` as TensorFlow does."""
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


def stateless_categorical(
    original, logits, num_samples, seed, dtype=tf.int64, name=None
):
    """Draws the argmax of the logits with noise, the same on every mesh.

    TensorFlow's own draws depend on how its threads share the rows. This is the
    Gumbel-max trick (https://arxiv.org/abs/1411.0030, section 2).
    """
    logits = tf.cast(tf.convert_to_tensor(logits), tf.float32)
    rows, classes = logits.shape
    numbers = uniform((rows, num_samples, classes), seed, tf.float32)
    smallest = np.finfo("float32").tiny
    noise = -tf.math.log(-tf.math.log(tf.maximum(numbers, smallest)))
    return tf.argmax(logits[:, None, :] + noise, -1, output_type=dtype)


def refused(name):
    """Returns a rule that refuses a function of `tf.random`."""

    def rule(original, *args, **kwargs):
        _refuse(f"`tf.random.{name}`")

    return rule


def _refuse(what):
    raise NotImplementedError(
        f"keras_tp has no rule for {what} under a distribution on TensorFlow: "
        "DTensor's own random numbers depend on the devices. Draw the numbers "
        "in the data pipeline and pass them to the model as an input, or use "
        f"uniform or normal numbers of float32. Received: {what}"
    )


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
