"""JAX: keras_tp against plain Keras, and against `shard_map` by hand.

    keras_tp         under `keras_tp.distribution.ModelParallel`
    keras            under `keras.distribution.ModelParallel`, hooks uninstalled
    shard_map        written by hand (`native_jax.py`), split alike
    keras, 1 device  plain Keras without a distribution
    jax, 1 device    the program by hand on one device

So `keras_tp / shard_map` is what keras_tp and Keras together cost over JAX,
and `keras, 1 device / jax, 1 device` is what Keras alone costs. All sides are
in one process and start from the same weights.
"""

import time

import decoder
import keras
import native_jax
import numpy as np

import keras_tp

RATIOS = [
    ("keras_tp", "keras"),
    ("keras_tp", "shard_map"),
    ("keras", "shard_map"),
    ("keras, 1 device", "jax, 1 device"),
]


def make_sides(options):
    """Returns a dict of a side's name to the callable that takes its turn."""
    own = decoder.distribution_of(keras_tp.distribution, options)
    plain = decoder.distribution_of(keras.distribution, options)

    def enter_own():
        # Installs the hooks too.
        keras_tp.distribution.set_distribution(own)

    def enter(distribution):
        keras_tp.uninstall()
        keras.distribution.set_distribution(distribution)

    x, y = decoder.make_data(options)
    weights = []

    def timed(enter, train):
        def turn():
            enter()
            start = time.perf_counter()
            loss = train(x, y)
            return (time.perf_counter() - start) / options.steps, loss

        return turn

    def keras_turn(enter):
        enter()
        model = decoder.build_model(options)
        weights.append({v.path: v.numpy() for v in model.trainable_variables})
        for path, value in weights[-1].items():
            np.testing.assert_array_equal(value, weights[0][path])
        return timed(enter, lambda x, y: decoder.train_epoch(model, x, y))

    def native_turn(device_count):
        native = native_jax.Trainer(options, weights[0], device_count)
        return timed(lambda: enter(None), native.train_epoch)

    return {
        "keras_tp": keras_turn(enter_own),
        "keras": keras_turn(lambda: enter(plain)),
        "shard_map": native_turn(options.devices),
        "keras, 1 device": keras_turn(lambda: enter(None)),
        "jax, 1 device": native_turn(1),
    }
