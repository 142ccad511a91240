"""Loops that generate tokens, such as KerasHub's `generate`."""

import functools

import numpy as np
import tensorflow as tf
from keras.src.distribution.distribution_lib import distribution

from keras_tp.backend.tensorflow import training
from keras_tp.backend.tensorflow.ops import random

_SMALLEST = np.finfo("float32").tiny


def hook_make_generate_function(original):
    """Runs the generation loop on the mesh and returns plain tensors."""

    @functools.wraps(original)
    def make_generate_function(self):
        if distribution() is None or self.generate_function is not None:
            return original(self)
        training.without_jit_compile(self)
        run = training.run_on_mesh(original(self))

        def generate_function(inputs, stop_token_ids=None):
            return training.to_host(run(inputs, stop_token_ids=stop_token_ids))

        self.generate_function = generate_function
        return generate_function

    return make_generate_function


def slice_update(original, inputs, start_indices, updates):
    """Writes into a KV cache by comparing positions.

    The dims that are written whole, such as the heads, may be split. Each
    device has all positions of the other dims.
    """
    inputs = tf.convert_to_tensor(inputs)
    updates = tf.convert_to_tensor(updates)
    if not (
        inputs.shape.is_fully_defined() and updates.shape.is_fully_defined()
    ):
        return original(inputs, start_indices, updates)
    starts = start_indices
    if tf.is_tensor(starts):
        starts = tf.unstack(starts)
    written = None
    for dim, start in enumerate(starts):
        size, part = inputs.shape[dim], updates.shape[dim]
        if part == size:
            continue
        # Like XLA, move an update back that would reach over the end.
        start = tf.clip_by_value(tf.cast(start, tf.int32), 0, size - part)
        position = tf.range(size) - start
        if part > 1:
            nearest = tf.clip_by_value(position, 0, part - 1)
            updates = tf.gather(updates, nearest, axis=dim)
        here = tf.logical_and(position >= 0, position < part)
        after = len(inputs.shape) - dim - 1
        here = tf.reshape(here, [size] + [1] * after)
        written = here if written is None else tf.logical_and(written, here)
    return updates if written is None else tf.where(written, updates, inputs)


def stateless_categorical(
    original, logits, num_samples, seed, dtype=tf.int64, name=None
):
    """Draws the argmax of the logits with noise, the same on every mesh.

    TensorFlow's own draws depend on how its threads share the rows. This is the
    Gumbel-max trick (https://arxiv.org/abs/1411.0030, section 2).
    """
    logits = tf.cast(tf.convert_to_tensor(logits), tf.float32)
    rows, classes = logits.shape
    uniform = random.uniform((rows, num_samples, classes), seed, tf.float32)
    noise = -tf.math.log(-tf.math.log(tf.maximum(uniform, _SMALLEST)))
    return tf.argmax(logits[:, None, :] + noise, -1, output_type=dtype)


RULES = [
    (
        "keras.src.backend.tensorflow.core",
        "slice_update",
        slice_update,
        "DTensor has no XlaDynamicUpdateSlice",
    ),
    (
        "tensorflow:random",
        "stateless_categorical",
        stateless_categorical,
        "tokens that are drawn are the same on every mesh",
    ),
]
