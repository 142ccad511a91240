"""Callbacks of Keras that write files, in a run that is interrupted."""

import keras
import pytest

from keras_tp.testing import models

CASE = models.CASES["pair"]
EPOCHS = 4


class Interrupted(Exception):
    """An error of a user's own."""


class Interrupt(keras.callbacks.Callback):
    """Ends training."""

    def on_epoch_begin(self, epoch, logs=None):
        if epoch == 2:
            raise Interrupted


def fit(callbacks):
    history = models.made(CASE).fit(
        *(CASE.x, CASE.y),
        batch_size=2,
        epochs=EPOCHS,
        shuffle=False,
        verbose=0,
        callbacks=callbacks,
    )
    return history.history["loss"]


# Names of a file, and of a folder in which each process writes its part.
@pytest.mark.parametrize(
    ("backup", "best"),
    [("backup", "best.weights.h5"), ("run.safetensors", "best.safetensors")],
)
def test_an_interrupted_run_goes_on(backup, best, tmp_path):
    def writers():
        return [
            keras.callbacks.BackupAndRestore(tmp_path / backup),
            keras.callbacks.ModelCheckpoint(
                tmp_path / best, monitor="loss", save_weights_only=True
            ),
            keras.callbacks.CSVLogger(tmp_path / "log.csv", append=True),
        ]

    expected = fit([])
    with models.model_parallel(CASE).scope():
        with pytest.raises(Interrupted):
            fit([*writers(), Interrupt()])
        models.assert_close(fit(writers()), expected[2:])
        other = models.made(CASE)
        other.load_weights(tmp_path / best)
        assert models.split(other)
    # One process has written each epoch, once.
    lines = (tmp_path / "log.csv").read_text().splitlines()
    assert [line.split(",")[0] for line in lines[1:]] == ["0", "1", "2", "3"]
