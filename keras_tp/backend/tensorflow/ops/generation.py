"""Loops that generate tokens, such as KerasHub's `generate`."""

import tensorflow as tf
from keras.src.distribution.distribution_lib import distribution

from keras_tp.backend.tensorflow import placement
from keras_tp.backend.tensorflow import training
from keras_tp.backend.tensorflow.around import around


@around
def hook_make_generate_function(original, self):
    """Runs the generation loop on the mesh and returns plain tensors."""
    if distribution() is None or self.generate_function is not None:
        return original(self)
    training.without_jit_compile(self)
    run = training.run_on_mesh(original(self))

    def generate_function(inputs, stop_token_ids=None):
        return placement.to_host(run(inputs, stop_token_ids=stop_token_ids))

    self.generate_function = generate_function
    return generate_function


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
