"""JAX: keras_tp against plain Keras, with the same layouts in one process.

One side is under `keras_tp.distribution.ModelParallel` with the hooks
installed, the other under `keras.distribution.ModelParallel` with the hooks
uninstalled.
"""

import time

import decoder
import keras
import numpy as np

import keras_tp

RATIOS = [("keras_tp", "keras")]


def make_sides(options):
    """Returns a dict of a side's name to the callable that takes its turn."""
    own = decoder.distribution_of(keras_tp.distribution, options)
    plain = decoder.distribution_of(keras.distribution, options)

    def enter_own():
        # Installs the hooks too.
        keras_tp.distribution.set_distribution(own)

    def enter_plain():
        keras_tp.uninstall()
        keras.distribution.set_distribution(plain)

    x, y = decoder.make_data(options)
    models = {}

    def make_turn(name, enter):
        enter()
        model = models[name] = decoder.build_model(options)

        def turn():
            enter()
            start = time.perf_counter()
            loss = decoder.train_epoch(model, x, y)
            return (time.perf_counter() - start) / options.steps, loss

        return turn

    turns = {
        "keras_tp": make_turn("keras_tp", enter_own),
        "keras": make_turn("keras", enter_plain),
    }
    for a, b in zip(*(model.get_weights() for model in models.values())):
        np.testing.assert_array_equal(a, b)
    return turns
