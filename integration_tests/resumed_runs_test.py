"""Runs that are interrupted and go on from a backup in `.safetensors`."""

import json
import os

import keras
import numpy as np
import pytest

import keras_tp
from integration_tests import harness
from integration_tests.callbacks_test import Interrupted
from integration_tests.callbacks_test import with_dropout
from integration_tests.checkpoints_test import SHAPES
from integration_tests.checkpoints_test import under
from keras_tp.backend import distribution_lib as lib
from keras_tp.backend.saving import checkpoint_folder

BACKEND = keras.config.backend()
EPOCHS, STEPS = 3, 6
# TensorFlow's data pipeline shuffles, and does not say how.
SHUFFLES = BACKEND != "tensorflow"


class Steps(keras.callbacks.Callback):
    """Notes the loss after each step; ends training as an error does.

    Attributes:
        losses: Dict of the epoch and the batch to the mean so far.
        ends: Dict of the epoch to the loss and the metric at its end.
    """

    def __init__(self, last=None):
        super().__init__()
        self.last = last
        self.losses, self.ends = {}, {}

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_train_batch_end(self, batch, logs=None):
        self.losses[self.epoch, batch] = float(logs["loss"])
        if (self.epoch, batch) == self.last:
            raise Interrupted

    def on_epoch_end(self, epoch, logs=None):
        self.ends[epoch] = dict(logs)


def network():
    model = with_dropout()
    model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
    return model


def arrays():
    rng = np.random.default_rng(5)
    return (
        rng.standard_normal((4 * STEPS, 6)).astype("float32"),
        rng.standard_normal((4 * STEPS, 4)).astype("float32"),
    )


class Noisy(keras.utils.PyDataset):
    """Draws noise for each batch from numpy's generator, as augmentation."""

    def __len__(self):
        return STEPS

    def __getitem__(self, index):
        rows = slice(4 * index, 4 * index + 4)
        x, y = (array[rows] for array in arrays())
        return x + np.random.standard_normal(x.shape).astype("float32"), y


class Own(keras.utils.PyDataset):
    """Shuffles after each epoch with a generator of its own."""

    def __init__(self):
        super().__init__()
        self.rng = np.random.default_rng(1)
        self.order = np.arange(4 * STEPS)

    def __len__(self):
        return STEPS

    def __getitem__(self, index):
        rows = self.order[4 * index : 4 * index + 4]
        x, y = arrays()
        return x[rows], y[rows]

    def on_epoch_end(self):
        self.order = self.rng.permutation(self.order)

    def state_dict(self):
        state = self.rng.bit_generator.state
        # JSON has no integers of this size in other languages: as text.
        return {"rng": json.dumps(state), "order": self.order}

    def load_state_dict(self, state):
        self.rng.bit_generator.state = json.loads(state["rng"])
        self.order = state["order"]


def from_arrays(shuffle=SHUFFLES):
    x, y = arrays()
    return {"x": x, "y": y, "batch_size": 4, "shuffle": shuffle}


def from_a_pipeline():
    import tensorflow as tf

    rows = tf.data.Dataset.from_tensor_slices(arrays())
    return {"x": rows.batch(4)}


def from_a_loader():
    import torch

    rows = torch.utils.data.TensorDataset(*map(torch.tensor, arrays()))
    loader = torch.utils.data.DataLoader(rows, batch_size=4, shuffle=True)
    return {"x": loader}


KINDS = {
    "arrays": from_arrays,
    "shuffled_in_batches": lambda: from_arrays(SHUFFLES and "batch"),
    "dataset": lambda: {"x": Noisy(), "shuffle": False},
    "own_state": lambda: {"x": Own(), "shuffle": False},
}
if BACKEND == "tensorflow":
    KINDS["pipeline"] = from_a_pipeline
if BACKEND == "torch":
    KINDS["loader"] = from_a_loader


def fit(callbacks, kind="arrays", seed=None, model=None, epochs=EPOCHS):
    model = model or network()
    if seed is not None:
        # As in a new process.
        keras.utils.set_random_seed(seed)
    steps = callbacks[-1]
    model.fit(
        **KINDS[kind](),
        epochs=epochs,
        verbose=0,
        callbacks=callbacks,
    )
    return steps, harness.weights_of(model)


def backup(path, freq="epoch", **arguments):
    return keras.callbacks.BackupAndRestore(path, save_freq=freq, **arguments)


def compare(path, freq, last, first, kind="arrays", shape=SHAPES[0]):
    """Compares an uninterrupted run with one that ends after a step."""
    whole = path.with_name("whole.safetensors")
    with under(shape):
        expected, weights = fit([backup(whole, freq), Steps()], kind)
        with pytest.raises(Interrupted):
            fit([backup(path, freq), Steps(last)], kind)
        assert checkpoint_folder.exists(path)
        found, resumed = fit([backup(path, freq), Steps()], kind, seed=4)
    assert min(found.losses) == first
    for step, loss in found.losses.items():
        assert loss == expected.losses[step], step
    assert found.ends == {e: expected.ends[e] for e in found.ends}
    for name, value in weights.items():
        np.testing.assert_array_equal(resumed[name], value, err_msg=name)
    lib.meet("A test")
    assert not path.exists()


@pytest.fixture
def path(tmp_path):
    keras_tp.install()
    return tmp_path / "backup.safetensors"


def test_data_with_a_state_of_its_own(path):
    compare(path, "epoch", last=(2, 1), first=(2, 0), kind="own_state")


def test_a_state_that_is_no_json(path):
    data = Own()
    data.state_dict = lambda: {"rng": data.rng}
    with under(SHAPES[0]):
        model = network()
        # Without a backup it is not asked for.
        model.fit(data, shuffle=False, verbose=0)
        with pytest.raises(TypeError, match="numbers, strings"):
            model.fit(data, shuffle=False, callbacks=[backup(path)])


def test_data_that_has_lost_its_state(path):
    with under(SHAPES[0]):
        with pytest.raises(Interrupted):
            fit([backup(path, 4), Steps((0, 4))], "own_state")
        with pytest.raises(ValueError, match="load_state_dict"):
            fit([backup(path, 4), Steps()], "dataset")


@pytest.mark.parametrize("shape", [SHAPES[0], None], ids=["split", "plain"])
def test_at_the_start_of_an_epoch(shape, path):
    compare(path, "epoch", last=(2, 1), first=(2, 0), shape=shape)


@pytest.mark.parametrize("kind", KINDS)
def test_in_the_middle_of_an_epoch(kind, path):
    compare(path, 4, last=(1, 4), first=(1, 2), kind=kind)


def test_the_last_batch_of_an_epoch(path):
    """What follows it, such as metrics and callbacks, has been done."""
    compare(path, 3, last=(1, 1), first=(1, 0))


def test_a_run_that_is_interrupted_twice(path):
    with under(SHAPES[0]):
        expected, _ = fit([backup(path, 2), Steps()])
        # In the epoch that the second run began with, too.
        for last, seed in [((1, 2), None), ((1, 4), 4)]:
            with pytest.raises(Interrupted):
                fit([backup(path, 2), Steps(last)], seed=seed)
        found, _ = fit([backup(path, 2), Steps()], seed=5)
    assert min(found.losses) == (1, 4)
    assert found.losses == {s: expected.losses[s] for s in found.losses}


def test_steps_per_execution(path):
    if BACKEND == "torch":
        pytest.skip("Keras on torch has no `steps_per_execution`")

    def of_two():
        model = network()
        model.compile("adam", "mse", steps_per_execution=2)
        return model

    with under(SHAPES[0]):
        expected, _ = fit([backup(path, 3), Steps()], model=of_two())
        with pytest.raises(Interrupted):
            fit([backup(path, 3), Steps((0, 5))], model=of_two())
        found, _ = fit([backup(path, 3), Steps()], model=of_two(), seed=4)
    assert min(found.losses) == (0, 5)
    assert found.losses == {s: expected.losses[s] for s in found.losses}


class Predicts(keras.callbacks.Callback):
    """Uses the model before the first step, and other data."""

    def __init__(self):
        super().__init__()
        self.rows = []

    def on_epoch_begin(self, epoch, logs=None):
        x, y = arrays()
        self.rows.append(len(self.model.predict(x, batch_size=4, verbose=0)))


def test_batches_of_other_methods_are_not_dropped(path):
    with under(SHAPES[0]):
        with pytest.raises(Interrupted):
            fit([backup(path, 4), Steps((0, 4))])
        predicts = Predicts()
        found, _ = fit([backup(path, 4), predicts, Steps()], seed=4)
        assert predicts.rows == [4 * STEPS] * EPOCHS
        assert min(found.losses) == (0, 4)


def test_a_run_that_fails_before_its_first_step(path):
    """The next `fit`, without a backup, takes all batches."""

    class Fails(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            raise Interrupted

    with under(SHAPES[0]):
        with pytest.raises(Interrupted):
            fit([backup(path, 4), Steps((0, 4))])
        with pytest.raises(Interrupted):
            fit([backup(path, 4), Fails()])
        found, _ = fit([Steps()])
    assert min(found.losses) == (0, 0)


def test_data_of_another_length(path):
    x, y = arrays()
    with under(SHAPES[0]):
        with pytest.raises(Interrupted):
            fit([backup(path, 4), Steps((0, 4))])
        model = network()
        with pytest.raises(ValueError, match="4 of 6 batches.*has 12"):
            model.fit(x, y, batch_size=2, callbacks=[backup(path, 4)])

        def few():
            yield x[:4], y[:4]

        # Data that does not say how long it is.
        edit_steps(path)
        with pytest.raises(ValueError, match="after 4 batches"):
            network().fit(few(), callbacks=[backup(path, 4)], verbose=0)


def edit_steps(path):
    """Makes a backup forget how many batches an epoch has."""
    from keras_tp.backend.saving import digests

    lib.meet("A test")
    if lib.process_id() == 0:
        index = path / checkpoint_folder.INDEX
        config = json.loads(index.read_text())
        added = config["metadata"]["keras_tp"]
        added["described"]["progress"]["steps"] = None
        added.pop("sha256")
        added["sha256"] = digests.digest_of_json(added)
        index.write_text(json.dumps(config))
    lib.meet("A test")


def test_the_folder_is_kept_on_request(path):
    with under(SHAPES[0]):
        fit([backup(path, delete_checkpoint=False), Steps()])
        # Nothing is left to do.
        found, _ = fit([backup(path, delete_checkpoint=False), Steps()])
        assert not found.losses
        # The model is there, too.
        model = keras.saving.load_model(path)
        assert model.optimizer.iterations == EPOCHS * STEPS
        # A save by name is a backup of no epoch.
        model.save(path)
        found, _ = fit([backup(path), Steps()])
        assert min(found.losses) == (0, 0)
    lib.meet("A test")
    assert not path.exists()


def test_a_save_that_fails_leaves_the_older_backup(path, monkeypatch):
    with under(SHAPES[0]):
        expected, _ = fit([backup(path), Steps()])
        write = checkpoint_folder.Save.write
        saves = []

        def fails(self, pieces):
            saves.append(self)
            if len(saves) == 2:
                raise OSError("No space is left")
            write(self, pieces)

        monkeypatch.setattr(checkpoint_folder.Save, "write", fails)
        with pytest.raises(OSError, match="No space"):
            fit([backup(path), Steps()])
        monkeypatch.undo()
        found, _ = fit([backup(path), Steps()], seed=4)
    assert min(found.losses) == (1, 0)
    assert found.losses == {s: expected.losses[s] for s in found.losses}
    lib.meet("A test")


def test_other_folders_are_those_of_keras(tmp_path):
    folder = tmp_path / "backup"
    with under(SHAPES[0]):
        with pytest.raises(Interrupted):
            fit([backup(folder, 4), Steps((0, 4))])
        assert (folder / "latest.weights.h5").exists()
        found, _ = fit([backup(folder, 4), Steps()])
        # Keras trains the epoch from its start.
        assert min(found.losses) == (0, 0)
        assert os.path.basename(folder) == "backup"
