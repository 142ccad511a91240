"""Runs callbacks at the same place in the loop in every process.

Callbacks that write files write them in process 0 only.
"""

import functools
import json
import os
import shutil
import tempfile

from keras.src.callbacks import orbax_checkpoint

from keras_tp.backend import random_state
from keras_tp.backend.hooks import Hook
from keras_tp.backend.processes import progress
from keras_tp.backend.saving import atomic_files
from keras_tp.backend.saving import digests
from keras_tp.backend.saving import one_writer

_BACKUP = "keras.src.callbacks.backup_and_restore:BackupAndRestore"
_END = "The end of `fit`, with `BackupAndRestore`,"
_END_OF_LOG = "The end of `fit`, with `CSVLogger`,"
_ORBAX = "keras.src.callbacks.orbax_checkpoint:OrbaxCheckpoint"
_SAVING_ORBAX = "Saving with `OrbaxCheckpoint`"
_CSV = "keras.src.callbacks.csv_logger:CSVLogger"


def table(processes):
    """Returns the rows of a hook table, for a backend with callback threads.

    On TensorFlow, Keras runs callbacks in the loop anyway.

    Args:
        processes: The backend's `processes` module, with `world_size`.
    """
    return [
        Hook(
            "keras.src.callbacks.callback_list:CallbackList",
            "_configure_async_dispatch",
            functools.partial(_dispatch_in_step, processes),
            "all processes convert to numpy in the same order",
        ),
    ]


def progress_table():
    """Returns the rows of a hook table that note when callbacks run."""
    return [
        Hook(
            "keras.src.callbacks.callback_list:CallbackList",
            f"on_{place}_{moment}",
            _noted,
            "a callback that is stuck is named by the other processes",
        )
        for place in (
            *("epoch", "train", "test", "predict"),
            *("train_batch", "test_batch", "predict_batch"),
        )
        for moment in ("begin", "end")
    ]


def _noted(original):
    name = original.__name__

    @functools.wraps(original)
    def method(self, *args, **kwargs):
        with progress.callback(name):
            return original(self, *args, **kwargs)

    return method


def _dispatch_in_step(processes, original):
    """Runs batch callbacks in the training loop instead of in threads.

    A callback may read values that are gathered from all processes. In a
    thread it could run before the next step in one process, and after it in
    another. Then their collectives would not match, and both would wait.
    """

    @functools.wraps(original)
    def _configure_async_dispatch(self, callbacks):
        if processes.world_size() == 1:
            original(self, callbacks)

    return _configure_async_dispatch


def files_table(processes):
    """Returns the rows of a hook table for callbacks that write files.

    Args:
        processes: The backend's `processes` module, with `is_first`,
            `longer`, `meet`, `random_state`, `set_random_state` and
            `world_size`.
    """
    return [
        *(
            Hook(
                _BACKUP,
                name,
                functools.partial(hook, processes),
                "weights and epoch are one file, which one process writes",
            )
            for name, hook in (
                ("_save_model", _save_backup),
                ("_load_model", _load_backup),
            )
        ),
        *(
            Hook(
                callback,
                "on_train_end",
                functools.partial(_end_in_first, processes, what),
                "one process removes or closes files, and all wait for it",
            )
            for callback, what in ((_BACKUP, _END), (_CSV, _END_OF_LOG))
        ),
        *(
            Hook(
                _CSV,
                name,
                functools.partial(_in_first, processes),
                "one process writes the file",
            )
            for name in ("on_train_begin", "on_epoch_end")
        ),
        *(
            Hook(
                _ORBAX,
                name,
                functools.partial(hook, processes),
                "one process writes the folder",
            )
            for name, hook in (
                ("_save_checkpoint", _save_orbax),
                ("on_train_end", _wait_for_orbax),
                ("wait_until_finished", _wait_for_orbax),
            )
        ),
        Hook(
            "keras.src.callbacks.tensorboard:TensorBoard",
            "set_model",
            functools.partial(_log_elsewhere, processes),
            "all processes gather what is shown and one writes it",
        ),
    ]


def _save_backup(processes, original):
    @functools.wraps(original)
    def _save_model(self):
        if not one_writer.has_a_layout(self.model):
            return original(self)
        progress = {
            "epoch": self._current_epoch,
            "batch": self._last_batch_seen,
        }
        if processes.is_first():
            os.makedirs(self.backup_dir, exist_ok=True)
            if self.double_checkpoint:
                _keep(self._weights_path, self._prev_weights_path)
                _keep(
                    self._training_metadata_path,
                    self._prev_training_metadata_path,
                )
        state = random_state.noted(self.model, processes)
        with one_writer.noting({**progress, "random": state}):
            self.model.save_weights(self._weights_path, overwrite=True)
        if processes.is_first():
            # For Keras without keras_tp, which reads the epoch from this file.
            with atomic_files.replaced(self._training_metadata_path) as path:
                with open(path, "w") as file:
                    json.dump(progress, file)

    return _save_model


def _keep(path, beside):
    if os.path.exists(path):
        with atomic_files.replaced(beside) as new:
            shutil.copyfile(path, new)


def _load_backup(processes, original):
    """Restores the epoch from the weights file, if the file has one."""

    @functools.wraps(original)
    def _load_model(self):
        if not one_writer.has_a_layout(self.model):
            return original(self)
        metadata_path = self._training_metadata_path
        # Without a metadata file, Keras reads the weights only.
        self._training_metadata_path = ""
        try:
            original(self)
        finally:
            self._training_metadata_path = metadata_path
        progress = None
        if os.path.exists(self._weights_path):
            progress = digests.progress_of(self._weights_path)
        if progress is not None:
            self.model._initial_epoch = progress["epoch"]
            if "random" in progress:
                random_state.restore(self.model, processes, progress["random"])
        elif os.path.exists(metadata_path):
            self.model._initial_epoch = _epoch_of(metadata_path)

    return _load_model


def _epoch_of(path):
    """Returns the epoch in a file that Keras wrote."""
    with open(path, "rb") as file:
        text = file.read()
    try:
        epoch = json.loads(text)["epoch"]
    except (ValueError, RecursionError, LookupError, TypeError) as e:
        raise _no_progress(path, text) from e
    if type(epoch) is not int or epoch < 0:
        raise _no_progress(path, text)
    return epoch


def _no_progress(path, text):
    return digests.UnreadableFileError(
        f"The file {path!r} does not say which epoch training came to: it has "
        'to hold `{"epoch": 3}` or the like. Remove the folder of the backup '
        f"to train from the start. Received: {text[:60]!r}"
    )


def _end_in_first(processes, what, original):
    """Removes or closes files in process 0 when all processes are at the end.

    The others wait for it, so that they find the files in their final state.
    """

    @functools.wraps(original)
    def on_train_end(self, logs=None):
        if processes.world_size() == 1 or not one_writer.has_a_layout(
            self.model
        ):
            return original(self, logs)
        processes.meet(what)
        if processes.is_first():
            original(self, logs)
        processes.meet(what)

    return on_train_end


def _save_orbax(processes, original):
    """Saves in process 0, unless Orbax's multi-host mode (JAX only) is on."""

    @functools.wraps(original)
    def _save_checkpoint(self, step, logs=None):
        if not _writes_orbax_for_all(self, processes):
            return original(self, step, logs)
        processes.meet(_SAVING_ORBAX)
        with processes.longer():
            if processes.is_first():
                original(self, step, logs)
            else:
                # The values are gathered from all processes.
                orbax_checkpoint._get_state_tree(self.model)
            processes.meet(_SAVING_ORBAX)

    return _save_checkpoint


def _wait_for_orbax(processes, original):
    """Makes all processes wait until the folder is complete."""

    @functools.wraps(original)
    def method(self, *args, **kwargs):
        result = original(self, *args, **kwargs)
        if _writes_orbax_for_all(self, processes):
            with processes.longer():
                processes.meet(_SAVING_ORBAX)
        return result

    return method


def _writes_orbax_for_all(callback, processes):
    return (
        processes.world_size() > 1
        and not callback.is_multihost_enabled()
        and one_writer.has_a_layout(callback.model)
    )


def _in_first(processes, original):
    """Runs a method that needs no other process in process 0 only."""

    @functools.wraps(original)
    def method(self, *args, **kwargs):
        if processes.is_first() or not one_writer.has_a_layout(self.model):
            return original(self, *args, **kwargs)

    return method


def _log_elsewhere(processes, original):
    """Makes the other processes log to a temporary folder."""

    @functools.wraps(original)
    def set_model(self, model):
        if not processes.is_first() and one_writer.has_a_layout(model):
            self._folder = tempfile.TemporaryDirectory()
            self.log_dir = self._folder.name
        return original(self, model)

    return set_model
