"""Files of a split model load anywhere, and the other way round."""

import keras
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


@pytest.mark.parametrize("names", [keras.saving, keras.models])
def test_names_that_save_and_load_folders(names, tmp_path):
    path = tmp_path / "model.safetensors"
    with models.model_parallel(CASE).scope():
        model, _ = models.trained(CASE)
        names.save_model(model, path)
        loaded = names.load_model(path)
        models.assert_close(models.values(loaded), models.values(model), 0)
        other = models.made(CASE)
        keras.saving.save_weights(model, path)
        keras.saving.load_weights(other, path)
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
