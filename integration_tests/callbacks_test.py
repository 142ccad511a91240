"""Callbacks that write files, in runs that are interrupted and resumed."""

import csv
import os
import pathlib
import time

import h5py
import keras
import numpy as np
import pytest

from integration_tests import harness
from keras_tp.backend import distribution_lib

LAYOUTS = {"up/kernel": (None, "model"), "down/kernel": ("model", None)}
EPOCHS = 4


class Interrupted(Exception):
    pass


class Interrupt(keras.callbacks.Callback):
    """Ends training as an error of one's own does."""

    def __init__(self, epoch):
        super().__init__()
        self.epoch = epoch

    def on_epoch_begin(self, epoch, logs=None):
        if epoch == self.epoch:
            raise Interrupted


def network():
    keras.utils.set_random_seed(3)
    inputs = keras.Input((6,))
    x = keras.layers.Dense(8, "relu", name="up")(inputs)
    model = keras.Model(inputs, keras.layers.Dense(4, name="down")(x))
    model.compile(keras.optimizers.Adam(0.01), "mse")
    return model


def fit(model, callbacks):
    rng = np.random.default_rng(5)
    x = rng.standard_normal((12, 6)).astype("float32")
    y = rng.standard_normal((12, 4)).astype("float32")
    history = model.fit(
        *(x, y),
        batch_size=4,
        epochs=EPOCHS,
        shuffle=False,
        verbose=0,
        callbacks=callbacks,
    )
    return history.history["loss"]


def train_with_writers(folder):
    """Trains, is interrupted, and goes on; returns what there is to compare.

    In every process of a run, with a folder that is theirs together.
    """
    folder = pathlib.Path(folder)
    backup = folder / "backup"

    def writers():
        return [
            keras.callbacks.BackupAndRestore(backup, double_checkpoint=True),
            keras.callbacks.CSVLogger(folder / "log.csv", append=True),
            keras.callbacks.ModelCheckpoint(
                folder / "best.weights.h5",
                monitor="loss",
                save_best_only=True,
                save_weights_only=True,
            ),
        ]

    whole = fit(network(), [])
    with pytest.raises(Interrupted):
        fit(network(), [*writers(), Interrupt(2)])
    left = sorted(os.listdir(backup))
    resumed = fit(network(), writers())
    with open(folder / "log.csv") as file:
        rows = list(csv.DictReader(file))
    return {
        "left": left,
        "loss": resumed,
        "expected": whole[2:],
        "epochs": [int(row["epoch"]) for row in rows],
        "logged": [float(row["loss"]) for row in rows],
        "whole": whole,
        "folder": sorted(os.listdir(folder)),
    }


def check(found):
    np.testing.assert_allclose(found["loss"], found["expected"], rtol=1e-6)
    # One process has written.
    assert found["epochs"] == list(range(EPOCHS))
    np.testing.assert_allclose(found["logged"], found["whole"], rtol=1e-6)
    assert found["left"] == [
        "latest.weights.h5",
        "latest.weights.h5.bkp",
        "training_metadata.json",
        "training_metadata.json.bkp",
    ]
    # The backup is gone when training has come to its end.
    assert found["folder"] == ["best.weights.h5", "log.csv"]


def test_an_interrupted_run_goes_on(tmp_path):
    with harness.model_parallel(LAYOUTS, harness.fitted((1, 2))).scope():
        found = train_with_writers(tmp_path)
    check(found)


def test_a_log_is_whole_after_training(tmp_path):
    class Slow(keras.callbacks.CSVLogger):
        def on_train_end(self, logs=None):
            # The process that writes comes to the end later than the others.
            if distribution_lib.process_id() == 0:
                time.sleep(1)
            super().on_train_end(logs)

    with harness.model_parallel(LAYOUTS, harness.fitted((1, 2))).scope():
        fit(network(), [Slow(tmp_path / "log.csv")])
    with open(tmp_path / "log.csv") as file:
        assert len(list(csv.DictReader(file))) == EPOCHS


def test_weights_and_epoch_are_of_one_moment(tmp_path):
    """A run that ends between the two files resumes where its weights are."""
    path = tmp_path / "training_metadata.json"
    with harness.model_parallel(LAYOUTS, harness.fitted((1, 2))).scope():
        with pytest.raises(Interrupted):
            fit(
                network(),
                [keras.callbacks.BackupAndRestore(tmp_path), Interrupt(3)],
            )
        with h5py.File(tmp_path / "latest.weights.h5") as file:
            assert '"epoch": 3' in file.attrs["keras_tp_progress"]
        path.write_text('{"epoch": 1, "batch": 0}')
        resumed = fit(network(), [keras.callbacks.BackupAndRestore(tmp_path)])
    assert len(resumed) == EPOCHS - 3


def test_tensorboard_is_written_by_one_process(tmp_path):
    with harness.model_parallel(LAYOUTS, harness.fitted((1, 2))).scope():
        fit(
            network(),
            [keras.callbacks.TensorBoard(tmp_path, histogram_freq=1)],
        )
    assert len(list((tmp_path / "train").iterdir())) == 1


def fit_with_averages(folder):
    """Returns the weights at the end, and those in the last checkpoint."""
    path = folder / "last.weights.h5"
    model = network()
    optimizer = keras.optimizers.Adam(0.01, use_ema=True, ema_momentum=0.5)
    model.compile(optimizer, "mse")
    fit(
        model,
        [
            keras.callbacks.SwapEMAWeights(swap_on_epoch=True),
            keras.callbacks.ModelCheckpoint(path, save_weights_only=True),
        ],
    )
    held = harness.weights_of(model)
    model.load_weights(path)
    return held, harness.weights_of(model)


def test_averages_are_swapped_and_saved(tmp_path):
    harness.assert_plain()
    expected = fit_with_averages(harness.own_folder(tmp_path))
    with harness.model_parallel(LAYOUTS, harness.fitted((1, 2))).scope():
        found = fit_with_averages(tmp_path)
    for held, other in zip(found, expected):
        for path, value in held.items():
            np.testing.assert_allclose(value, other[path], rtol=1e-5, atol=1e-6)


def with_dropout():
    keras.utils.set_random_seed(3)
    inputs = keras.Input((6,))
    x = keras.layers.Dense(8, "relu", name="up")(inputs)
    x = keras.layers.Dropout(0.5)(x)
    model = keras.Model(inputs, keras.layers.Dense(4, name="down")(x))
    model.compile(keras.optimizers.Adam(0.01), "mse")
    # Keras's generator for such draws is made now. The seed that the resumed
    # run sets takes it away again.
    keras.random.uniform((1,))
    return model


def fit_shuffled(model, folder, *callbacks):
    rng = np.random.default_rng(5)
    backup = keras.callbacks.BackupAndRestore(folder, delete_checkpoint=False)
    model.fit(
        rng.standard_normal((12, 6)).astype("float32"),
        rng.standard_normal((12, 4)).astype("float32"),
        batch_size=4,
        epochs=EPOCHS,
        # TensorFlow's data pipeline shuffles, and does not say how.
        shuffle=keras.config.backend() != "tensorflow",
        verbose=0,
        callbacks=[backup, *callbacks],
    )
    return harness.weights_of(model)


def test_a_resumed_run_is_the_uninterrupted_one(tmp_path):
    with harness.model_parallel(LAYOUTS, harness.fitted((1, 2))).scope():
        expected = fit_shuffled(with_dropout(), str(tmp_path / "whole"))
        with pytest.raises(Interrupted):
            fit_shuffled(with_dropout(), str(tmp_path / "cut"), Interrupt(2))
        # As a new process would be.
        model = with_dropout()
        keras.utils.set_random_seed(4)
        resumed = fit_shuffled(model, str(tmp_path / "cut"))
    for path, value in expected.items():
        np.testing.assert_array_equal(resumed[path], value, err_msg=path)


class Looks(keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.losses = []

    def on_train_batch_end(self, batch, logs=None):
        self.losses.append(logs["loss"])


class LooksAtAny(Looks):
    on_train_batch_end = keras.callbacks.Callback.on_train_batch_end

    def on_batch_end(self, batch, logs=None):
        self.losses.append(logs["loss"])


def set_on_the_instance():
    callback = Looks()
    looks = callback.on_train_batch_end
    lambda_callback = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: looks(batch, logs)
    )
    lambda_callback.losses = callback.losses
    return lambda_callback


def test_numbers_of_a_batch_are_read_only_for_a_callback(logs_read):
    with harness.model_parallel(LAYOUTS, harness.fitted((1, 2))).scope():
        model = network()
        fit(model, [])
        # The end of each epoch, and of training.
        assert sum(logs_read) == EPOCHS + 1
        for make in (Looks, LooksAtAny, set_on_the_instance):
            logs_read.clear()
            looks = make()
            losses = fit(model, [looks])
            assert len(looks.losses) == 3 * EPOCHS
            # The loss of an epoch is the mean so far.
            np.testing.assert_allclose(looks.losses[2::3], losses, rtol=1e-6)
            assert sum(logs_read) == 4 * EPOCHS + 1
