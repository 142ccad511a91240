"""Splits a model that was trained on one device, and goes on training it.

python -m keras_tp.launch --devices 2 examples/existing_model.py
"""

import keras
import numpy as np

from keras_tp import TensorParallelKeras
from keras_tp import distribution


def build():
    """Returns a small network."""
    return keras.Sequential(
        [
            keras.Input((16,)),
            keras.layers.Dense(256, activation="relu", name="up"),
            keras.layers.Dense(32, activation="relu", name="down"),
            keras.layers.Dense(4, name="head"),
        ]
    )


def main():
    """Trains, splits, trains on, and goes back to one device."""
    keras.utils.set_random_seed(0)
    rng = np.random.default_rng(0)
    x = rng.standard_normal((64, 16), "float32")
    y = x[:, :4] * x[:, 4:8]
    model = build()
    model.compile("adam", "mse")
    model.fit(x, y, epochs=5, verbose=0)
    before = model.predict(x, verbose=0)

    # The same object, its weights and the optimizer's slots split.
    model = TensorParallelKeras(model)
    after = model.predict(x, verbose=0)
    print("outputs differ by", float(np.max(np.abs(after - before))))
    print(distribution.describe(model))
    print("sends", distribution.count_collectives(model, x, y))
    history = model.fit(x, y, epochs=5, verbose=0)
    print("losses", history.history["loss"])

    # And back to one device.
    one = distribution.DataParallel(devices=["cpu:0"])
    distribution.distribute_model(model, one)
    print("on one device", model.evaluate(x, y, verbose=0))


if __name__ == "__main__":
    main()
