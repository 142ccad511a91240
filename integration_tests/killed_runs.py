"""Trains with backups, and kills itself; `killed_runs_test.py` runs it.

killed_runs.py killed FOLDER
killed_runs.py killed_in_a_save FOLDER
killed_runs.py resumed FOLDER
"""

import json
import os
import pathlib
import signal
import sys

import keras
import numpy as np

from keras_tp import distribution
from keras_tp.backend import distribution_lib as lib
from keras_tp.backend.saving import checkpoint_folder

WORDS, LENGTH = 51, 8
EPOCHS, STEPS, ROWS = 3, 4, 8
# The backups are made after every second batch.
FREQUENCY = 2
LAST = (1, 2)


def network(rate):
    """Returns a small transformer, compiled."""
    inputs = keras.Input((LENGTH,), dtype="int32")
    x = keras.layers.Embedding(WORDS, 16, name="words")(inputs)
    x = x + keras.layers.MultiHeadAttention(4, 4, name="attention")(x, x)
    y = keras.layers.Dense(32, activation="gelu", name="up")(x)
    if rate:
        y = keras.layers.Dropout(rate, seed=7)(y)
    x = x + keras.layers.Dense(16, name="down")(y)
    outputs = keras.layers.Dense(WORDS, name="logits")(x)
    model = keras.Model(inputs, outputs)
    model.compile(
        keras.optimizers.Adam(0.01),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model


class Losses(keras.callbacks.Callback):
    """Notes the mean loss after each step; may end this process."""

    def __init__(self, last=None):
        super().__init__()
        self.last, self.found = last, {}

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_train_batch_end(self, batch, logs=None):
        numbers = float(logs["loss"]), float(logs["accuracy"])
        self.found[f"{self.epoch}, {batch}"] = numbers
        if (self.epoch, batch) == self.last and lib.process_id() == 0:
            kill()


def kill():
    os.kill(os.getpid(), signal.SIGKILL)


def kill_in_the_second_save():
    """Ends this process when its files are there, before the index is."""
    publish, saves = checkpoint_folder._publish, []

    def ends(*arguments):
        saves.append(arguments)
        if len(saves) == 2:
            kill()
        publish(*arguments)

    checkpoint_folder._publish = ends


def train(rate, *callbacks):
    count = distribution.get_device_count()
    mesh = distribution.DeviceMesh(
        (1, count), ["batch", "model"], distribution.list_devices()
    )
    x, y = np.random.default_rng(0).integers(
        0, WORDS, (2, STEPS * ROWS, LENGTH), "int32"
    )
    with distribution.TensorParallel(mesh, strict=False).scope():
        model = network(rate)
        # TensorFlow's data pipeline shuffles, and does not say how. The others
        # do, each in its own way.
        shuffle = bool(rate) and keras.config.backend() != "tensorflow"
        model.fit(
            *(x, y),
            batch_size=ROWS,
            epochs=EPOCHS,
            shuffle=shuffle,
            verbose=0,
            callbacks=callbacks,
        )


def main(mode, folder, rate):
    """Trains to the end, and then with backups; or goes on from a backup."""
    folder, rate = pathlib.Path(folder), float(rate)
    backup = keras.callbacks.BackupAndRestore(
        folder / "backup.safetensors",
        save_freq=FREQUENCY,
        delete_checkpoint=False,
    )
    whole, losses = Losses(), Losses(LAST if mode == "killed" else None)
    if mode != "resumed":
        keras.utils.set_random_seed(3)
        train(rate, whole)
        if lib.process_id() == 0:
            (folder / "whole.json").write_text(json.dumps(whole.found))
            if mode == "killed_in_a_save":
                kill_in_the_second_save()
    keras.utils.set_random_seed(3 if mode != "resumed" else 4)
    train(rate, backup, losses)
    if lib.process_id() == 0:
        (folder / "resumed.json").write_text(json.dumps(losses.found))


if __name__ == "__main__":
    main(*sys.argv[1:])
