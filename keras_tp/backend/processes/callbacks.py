"""Runs callbacks at the same place in the loop in every process.

Callbacks that write files write them in process 0 only.
"""

import json
import os
import shutil
import tempfile

from keras.src.callbacks import orbax_checkpoint
from keras.src.distribution.distribution_lib import distribution
from keras.src.utils.python_utils import is_default

from keras_tp.backend import current
from keras_tp.backend import random_state
from keras_tp.backend.hooks import Hook
from keras_tp.backend.hooks import around
from keras_tp.backend.hooks import methods_row
from keras_tp.backend.processes import progress
from keras_tp.backend.processes import timeouts
from keras_tp.backend.saving import atomic_files
from keras_tp.backend.saving import digests
from keras_tp.backend.saving import one_writer

_MOMENTS = tuple(
    f"on_{place}_{moment}"
    for place in (
        *("epoch", "train", "test", "predict"),
        *("train_batch", "test_batch", "predict_batch"),
    )
    for moment in ("begin", "end")
)
_SAVING_ORBAX = "Saving with `OrbaxCheckpoint`"


def table():
    """Returns the rows of a hook table."""
    folder = "keras.src.callbacks"
    return [
        Hook(
            "keras.src.utils.io_utils",
            "print_msg",
            around(_print_in_first),
            "one process prints progress",
        ),
        Hook(
            f"{folder}.callback_list:CallbackList",
            _MOMENTS,
            around(_run_if_read),
            "callbacks run in step, and an error names a stuck process",
        ),
        methods_row(
            f"{folder}.backup_and_restore:BackupAndRestore",
            _Backup,
            "weights and epoch are one file, which one process writes",
        ),
        methods_row(
            f"{folder}.csv_logger:CSVLogger",
            _CsvLogger,
            "one process writes the file",
        ),
        methods_row(
            f"{folder}.orbax_checkpoint:OrbaxCheckpoint",
            _Orbax,
            "one process writes the folder",
        ),
        Hook(
            f"{folder}.tensorboard:TensorBoard",
            "set_model",
            around(_log_elsewhere),
            "all processes gather the values and one process writes them",
        ),
    ]


def _processes():
    return current.load("processes")


def _print_in_first(original, *args, **kwargs):
    if _processes().is_first():
        original(*args, **kwargs)


def _run_in_step(original, self, *args, **kwargs):
    """Runs callbacks in the training loop, and notes which ones run.

    A callback may read values that are gathered from all processes. In a
    thread it could run before the next step in one process, and after it in
    another. Then their collectives would not match, and both would wait. One
    process alone runs them as Keras does.
    """
    if _processes().world_size() == 1:
        return original(self, *args, **kwargs)
    self._async_train = self._async_test = self._async_predict = False
    with progress.callback(original.__name__):
        return original(self, *args, **kwargs)


def _run_if_read(original, self, *args, **kwargs):
    """Reads the numbers of a batch only if a callback looks at them.

    To read them is to wait for the step.
    """
    if not _is_unread(self.callbacks, original.__name__):
        return _run_in_step(original, self, *args, **kwargs)


def _is_unread(callbacks, moment):
    """Returns whether no callback does anything at the end of a batch."""
    if not moment.endswith("_batch_end") or distribution() is None:
        return False
    moments = {moment}
    if moment == "on_train_batch_end":
        moments.add("on_batch_end")
    return all(
        is_default(getattr(callback, name))
        for callback in callbacks
        for name in moments
    )


def _end_in_first(original, self, logs=None):
    """Removes or closes files in process 0 when all processes are at the end.

    The others wait for it, so that they find the files in their final state.
    """
    processes = _processes()
    if processes.world_size() == 1 or not one_writer.has_a_layout(self.model):
        return original(self, logs)
    what = f"The end of `fit`, with `{type(self).__name__}`,"
    processes.meet(what)
    if processes.is_first():
        original(self, logs)
    processes.meet(what)


def _in_first(original, self, *args, **kwargs):
    """Runs a method that needs no other process in process 0 only."""
    if _processes().is_first() or not one_writer.has_a_layout(self.model):
        return original(self, *args, **kwargs)


class _Backup:
    """Methods of `BackupAndRestore`."""

    on_train_end = _end_in_first

    def _save_model(original, self):
        if not one_writer.has_a_layout(self.model):
            return original(self)
        reached = {
            "epoch": self._current_epoch,
            "batch": self._last_batch_seen,
        }
        is_first = _processes().is_first()
        if is_first:
            os.makedirs(self.backup_dir, exist_ok=True)
            if self.double_checkpoint:
                _keep(self._weights_path, self._prev_weights_path)
                _keep(
                    self._training_metadata_path,
                    self._prev_training_metadata_path,
                )
        state = random_state.noted(self.model)
        with one_writer.noting({**reached, "random": state}):
            self.model.save_weights(self._weights_path, overwrite=True)
        if is_first:
            # For Keras without keras_tp, which reads the epoch from this file.
            with atomic_files.replaced(self._training_metadata_path) as path:
                with open(path, "w") as file:
                    json.dump(reached, file)

    def _load_model(original, self):
        """Restores the epoch from the weights file, if the file has one."""
        if not one_writer.has_a_layout(self.model):
            return original(self)
        metadata_path = self._training_metadata_path
        # Without a metadata file, Keras reads the weights only.
        self._training_metadata_path = ""
        try:
            original(self)
        finally:
            self._training_metadata_path = metadata_path
        reached = None
        if os.path.exists(self._weights_path):
            reached = digests.progress_of(self._weights_path)
        if reached is not None:
            self.model._initial_epoch = reached["epoch"]
            if "random" in reached:
                random_state.restore(self.model, reached["random"])
        elif os.path.exists(metadata_path):
            self.model._initial_epoch = _epoch_of(metadata_path)


def _keep(path, beside):
    if os.path.exists(path):
        with atomic_files.replaced(beside) as new:
            shutil.copyfile(path, new)


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
        f"The file {path!r} must hold the epoch of the backup, as in "
        '`{"epoch": 3}`. To train from the start, remove the folder of the '
        f"backup. Received: {text[:60]!r}"
    )


class _CsvLogger:
    """Methods of `CSVLogger`."""

    on_train_begin = on_epoch_end = _in_first
    on_train_end = _end_in_first


def _wait_for_orbax(original, self, *args, **kwargs):
    """Makes all processes wait until the folder is complete."""
    result = original(self, *args, **kwargs)
    if _writes_orbax_for_all(self):
        with timeouts.longer():
            _processes().meet(_SAVING_ORBAX)
    return result


class _Orbax:
    """Methods of `OrbaxCheckpoint`."""

    on_train_end = wait_until_finished = _wait_for_orbax

    def _save_checkpoint(original, self, step, logs=None):
        if not _writes_orbax_for_all(self):
            return original(self, step, logs)
        processes = _processes()
        processes.meet(_SAVING_ORBAX)
        with timeouts.longer():
            if processes.is_first():
                original(self, step, logs)
            else:
                # The values are gathered from all processes.
                orbax_checkpoint._get_state_tree(self.model)
            processes.meet(_SAVING_ORBAX)


def _writes_orbax_for_all(callback):
    """Returns whether Orbax's multi-host mode (JAX only) is off."""
    return (
        _processes().world_size() > 1
        and not callback.is_multihost_enabled()
        and one_writer.has_a_layout(callback.model)
    )


def _log_elsewhere(original, self, model):
    """Makes the other processes log to a temporary folder."""
    if not _processes().is_first() and one_writer.has_a_layout(model):
        self._folder = tempfile.TemporaryDirectory()
        self.log_dir = self._folder.name
    return original(self, model)
