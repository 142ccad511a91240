"""TensorFlow: keras_tp against a loop written by hand for DTensor.

Both split the same variables in the same places, and both take their batches
from one `tf.data.Dataset` and pack them for the devices in the loop. (From
arrays, Keras makes a dataset for each `fit`, with a distribution or without.)
The loop by hand waits for the devices at the end of a turn only.
"""

import time

import decoder
import native_tensorflow
import tensorflow as tf

import keras_tp

RATIOS = [("keras_tp", "dtensor by hand")]


def make_sides(options):
    """Returns a dict of a side's name to the callable that takes its turn."""
    keras_tp.distribution.set_distribution(
        decoder.distribution_of(keras_tp.distribution, options)
    )
    model = decoder.build_model(options)
    native = native_tensorflow.Trainer(
        options, {v.path: v.numpy() for v in model.trainable_variables}
    )
    x, y = decoder.make_data(options)
    batches = tf.data.Dataset.from_tensor_slices((x, y))
    batches = batches.batch(decoder.BATCH_SIZE).prefetch(2)
    # The thread that tunes a dataset sleeps up to 2.5 seconds in a turn, and
    # sometimes the end of the turn waits until it wakes up.
    tuning = tf.data.Options()
    tuning.autotune.enabled = False
    batches = batches.with_options(tuning)

    def timed(train):
        def turn():
            start = time.perf_counter()
            loss = train()
            return (time.perf_counter() - start) / options.steps, loss

        return turn

    return {
        "keras_tp": timed(lambda: decoder.train_epoch(model, batches)),
        "dtensor by hand": timed(lambda: native.train_epoch(batches)),
    }
