"""Files of a split model load anywhere, and the other way round."""

import keras

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
        distribution.save_checkpoint(model, path)
        expected = models.values(model)
        slots = [
            keras.ops.convert_to_numpy(v) for v in model.optimizer.variables
        ]
        other = models.made(CASE)
        distribution.load_checkpoint(other, path)
        models.assert_close(models.values(other), expected, 0)
        found = [
            keras.ops.convert_to_numpy(v) for v in other.optimizer.variables
        ]
        models.assert_close(found, slots, 0)
