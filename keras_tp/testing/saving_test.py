"""Files of a split model load anywhere, and the other way round."""

import importlib

import keras
import numpy as np
import pytest

from keras_tp import backend
from keras_tp import distribution
from keras_tp.testing import models

CASE = models.CASES["pair"]


def test_a_model_file(tmp_path):
    with models.model_parallel(CASE).scope():
        model, _ = models.trained(CASE)
        model.save(tmp_path / "model.keras")
        expected = models.values(model)
    distribution.set_distribution(None)
    models.assert_close(
        models.values(keras.saving.load_model(tmp_path / "model.keras")),
        expected,
        0,
    )
    with models.model_parallel(CASE).scope():
        loaded = keras.saving.load_model(tmp_path / "model.keras")
        assert loaded.train_on_batch(CASE.x, CASE.y) == model.train_on_batch(
            CASE.x, CASE.y
        )


def test_a_sharded_checkpoint(tmp_path):
    path = tmp_path / "model.safetensors"
    with models.model_parallel(CASE).scope():
        model, _ = models.trained(CASE)
        distribution.save_checkpoint(path, model)
        expected = models.values(model)
        slots = [
            keras.ops.convert_to_numpy(v) for v in model.optimizer.variables
        ]
        other = models.made(CASE)
        distribution.load_checkpoint(path, other)
        models.assert_close(models.values(other), expected, 0)
        found = [
            keras.ops.convert_to_numpy(v) for v in other.optimizer.variables
        ]
        models.assert_close(found, slots, 0)


def test_paths_in_safetensors(tmp_path):
    weights = tmp_path / "weights.safetensors"
    whole = tmp_path / "model.safetensors"
    with models.model_parallel(CASE).scope():
        model, _ = models.trained(CASE)
        model.save_weights(weights)
        keras.saving.save_model(model, whole)
        expected = models.values(model)
        other = models.made(CASE)
        other.load_weights(weights)
        models.assert_close(models.values(other), expected, 0)
        loaded = keras.saving.load_model(whole)
        models.assert_close(models.values(loaded), expected, 0)
        assert models.split(loaded) == models.split(model)


# `tf.keras` has the second half of these names.
@pytest.mark.parametrize(
    "names",
    [
        f"{package}.{module}"
        for package in ("keras", "keras._tf_keras.keras")
        for module in ("saving", "models")
    ],
)
def test_names_that_save_and_load_folders(names, tmp_path):
    path = tmp_path / "model.safetensors"
    names = importlib.import_module(names)
    with models.model_parallel(CASE).scope():
        model, _ = models.trained(CASE)
        names.save_model(model, path)
        loaded = names.load_model(path)
        models.assert_close(models.values(loaded), models.values(model), 0)
        # `keras.models` has no such functions.
        if hasattr(names, "save_weights"):
            other = models.made(CASE)
            names.save_weights(model, path)
            names.load_weights(other, path)
            models.assert_close(models.values(other), models.values(model), 0)


def test_older_formats(tmp_path):
    path = tmp_path / "model.h5"
    with models.model_parallel(CASE).scope():
        model, _ = models.trained(CASE)
        model.save(path)
        # Keras does not find the loss of such a file by its name.
        loaded = keras.saving.load_model(path, compile=False)
        models.assert_close(models.values(loaded), models.values(model), 0)
        lib = backend.distribution_lib
        lib.meet("The test")
        if lib.process_id() == 0:
            path.write_bytes(path.read_bytes()[:-2000])
        lib.meet("The test")
        with pytest.raises(ValueError, match=path.name):
            keras.saving.load_model(path, compile=False)


def test_a_state_tree_with_a_value_too_many():
    with models.model_parallel(CASE).scope():
        model, _ = models.trained(CASE)
        tree = model.get_state_tree()
        model.set_state_tree(tree)
        tree["trainable_variables"]["nowhere"] = {"kernel": CASE.x}
        with pytest.raises(ValueError, match="nowhere"):
            model.set_state_tree(tree)


class Grown(keras.layers.Dense):
    """A layer with a variable more than when it was saved."""

    is_grown = False

    def build(self, shape):
        super().build(shape)
        if self.is_grown:
            self.add_weight(shape=(2,), name="more")


def test_a_folder_of_orbax(tmp_path, monkeypatch):
    pytest.importorskip("orbax.checkpoint")

    def build():
        inputs = keras.Input((models.WIDTH,))
        return keras.Model(inputs, Grown(models.WIDTH, name="up_0")(inputs))

    layouts = {".*up_0/kernel": models.COLUMN}
    case = CASE._replace(build=build, layouts=layouts)
    with models.model_parallel(case).scope():
        model = models.made(case)
        callback = keras.callbacks.OrbaxCheckpoint(
            str(tmp_path), save_on_background=False
        )
        model.fit(CASE.x, CASE.y, verbose=0, callbacks=[callback])
        custom = {"Grown": Grown}
        loaded = keras.saving.load_model(str(tmp_path), custom_objects=custom)
        models.assert_close(models.values(loaded), models.values(model), 0)
        assert models.split(loaded) == models.split(model)
        monkeypatch.setattr(Grown, "is_grown", True)
        with pytest.raises(ValueError, match="up_0/more"):
            keras.saving.load_model(str(tmp_path), custom_objects=custom)


def test_a_program_for_one_device(tmp_path):
    is_torch = keras.config.backend() == "torch"
    path = tmp_path / ("program.pt2" if is_torch else "program")
    with models.model_parallel(CASE).scope():
        model, _ = models.trained(CASE)
    expected = model.predict(CASE.x, verbose=0)
    split = models.split(model)
    if is_torch:
        import torch

        # Torch takes the size of the batch from an example of one.
        model.export(path, format="torch", verbose=False)
        program = torch.export.load(path).module()
        served = program(torch.from_numpy(CASE.x[:1])).detach()
    else:
        tf = pytest.importorskip("tensorflow")
        model.export(path, verbose=False)
        program = tf.saved_model.load(str(path))
        served = program.serve(CASE.x[:1])
    models.assert_close(np.asarray(served), expected[:1])
    # The model goes on as it was.
    assert models.split(model) == split
    models.assert_close([model.predict(CASE.x, verbose=0)], [expected], 0)


class Breaks(keras.layers.Dense):
    """A layer that cannot be saved while `broken` is true."""

    broken = False

    def save_own_variables(self, store):
        if self.broken:
            raise OSError("no space left on the disk")
        super().save_own_variables(store)


def test_a_save_that_ends_midway_keeps_the_older_file(tmp_path):
    path = tmp_path / "model.weights.h5"

    def build():
        inputs = keras.Input((models.WIDTH,))
        x = Breaks(64, name="up_0")(inputs)
        return keras.Model(inputs, Breaks(16, name="down_0")(x))

    case = CASE._replace(build=build)
    with models.model_parallel(case).scope():
        model, _ = models.trained(case)
        model.save_weights(path)
        expected = models.values(model)
        model.train_on_batch(CASE.x, CASE.y)
        model.layers[-1].broken = True
        with pytest.raises(OSError, match="no space left"):
            model.save_weights(path)
        other = models.made(case)
        other.load_weights(path)
        models.assert_close(models.values(other), expected, 0)


def test_a_damaged_file_is_an_error_and_changes_nothing(tmp_path):
    path = tmp_path / "model.weights.h5"
    with models.model_parallel(CASE).scope():
        model, _ = models.trained(CASE)
        model.save_weights(path)
        kernel = models.values(model)[0]
        if backend.distribution_lib.process_id() == 0:
            damage(path, kernel)
        backend.distribution_lib.meet("a file was damaged")
        other = models.made(CASE)
        before = models.values(other)
        with pytest.raises(ValueError, match="model.weights.h5"):
            other.load_weights(path)
        models.assert_close(models.values(other), before, 0)


def damage(path, value):
    """Changes one number of an array in a file."""
    data = path.read_bytes()
    start = data.index(value.tobytes()[:16])
    changed = bytes([data[start] ^ 1])
    path.write_bytes(data[:start] + changed + data[start + 1 :])
