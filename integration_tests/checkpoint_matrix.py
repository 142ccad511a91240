"""Saves a checkpoint, or loads several; `checkpoint_matrix_test.py` runs it.

checkpoint_matrix.py save FOLDER
checkpoint_matrix.py load FOLDER FOLDER ...
"""

import itertools
import json
import os
import pathlib
import sys

import keras
import numpy as np

from keras_tp import distribution
from keras_tp.backend import distribution_lib as lib

WORDS, LENGTH = 51, 8
x, y = np.random.default_rng(0).integers(0, WORDS, (2, 8, LENGTH), "int32")


def network():
    """Returns a small transformer, compiled."""
    inputs = keras.Input((LENGTH,), dtype="int32")
    x = keras.layers.Embedding(WORDS, 16, name="words")(inputs)
    x = x + keras.layers.MultiHeadAttention(4, 4, name="attention")(x, x)
    y = keras.layers.Dense(32, activation="gelu", name="up")(x)
    x = x + keras.layers.Dense(16, name="down")(y)
    outputs = keras.layers.Dense(WORDS, name="logits")(x)
    model = keras.Model(inputs, outputs)
    model.compile(
        keras.optimizers.Adam(0.01),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    return model


def values_of(model):
    """Returns the values of weights, slots and the number of the step."""
    return [
        np.asarray(keras.ops.convert_to_numpy(variable))
        for variable in (*model.weights, *model.optimizer.variables)
    ]


def made(how, folder):
    """Returns a model that saves to a folder, or was loaded from it."""
    if how == "load_model":
        return keras.saving.load_model(folder)
    model = network()
    if how == "save":
        model.fit(x, y, verbose=0)
        distribution.save_checkpoint(folder, model)
    else:
        distribution.load_checkpoint(folder, model)
    return model


def main(mode, *folders):
    """Saves to a folder, or loads each of several and compares the values."""
    ways = {"save": ["save"], "load": ["load_checkpoint", "load_model"]}[mode]
    count = distribution.get_device_count()
    mesh = distribution.DeviceMesh(
        (1, count), ["batch", "model"], distribution.list_devices()
    )
    paths = map(pathlib.Path, folders)
    for folder, how in itertools.product(paths, ways):
        keras.utils.set_random_seed(len(mode))
        parallel = distribution.TensorParallel(mesh, strict=False)
        with parallel.scope():
            model = made(how, folder)
            values, loss = values_of(model), model.train_on_batch(x, y)
        expected, losses = folder / "values.npz", folder / "loss.json"
        if mode == "load":
            with np.load(expected) as held:
                for value, name in zip(values, held.files, strict=True):
                    np.testing.assert_array_equal(value, held[name])
            wanted = json.loads(losses.read_text())
            np.testing.assert_allclose(loss, wanted, rtol=1e-5)
        elif lib.process_id() == 0:
            np.savez(expected, *values)
            losses.write_text(json.dumps(float(loss)))
    if lib.process_id() == 0:
        os.write(1, f"{mode}: {len(folders)}\n".encode())


if __name__ == "__main__":
    main(*sys.argv[1:])
