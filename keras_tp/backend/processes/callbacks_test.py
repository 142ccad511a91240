import os

import keras
import pytest
from keras.src.callbacks.callback_list import CallbackList

import keras_tp

pytestmark = pytest.mark.skipif("RANK" in os.environ, reason="for one process")


def test_one_process_runs_callbacks_of_batches_as_keras_does():
    keras_tp.uninstall()
    original = CallbackList.on_train_batch_end
    save_model = keras.callbacks.BackupAndRestore._save_model
    keras_tp.install()
    try:
        assert CallbackList.on_train_batch_end is original
        # The hooks are in place.
        assert keras.callbacks.BackupAndRestore._save_model is not save_model
    finally:
        keras_tp.uninstall()
