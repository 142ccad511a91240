"""Names of Keras that read and write checkpoints: paths in `.safetensors`.

A path that ends in `.safetensors` means the folder that `save_checkpoint`
writes, wherever Keras takes the path of a model or of weights.
"""

import inspect
import os

from keras.src.saving.orbax_util import is_orbax_checkpoint
from keras.src.utils import io_utils

from keras_tp import backend
from keras_tp.backend.hooks import Hook
from keras_tp.backend.hooks import methods_row
from keras_tp.backend.processes import timeouts
from keras_tp.backend.saving import checkpoint_folder
from keras_tp.distribution import checkpoints
from keras_tp.distribution import resumed_epochs

_SUFFIX = ".safetensors"
_ENDING = "a path that ends in `.safetensors` is a folder of all processes"


def is_folder(path):
    """Returns whether a path means the folder of a checkpoint."""
    if not isinstance(path, (str, os.PathLike)):
        return False
    path = os.fspath(path)
    if not isinstance(path, str) or "://" in path:
        return False
    return path.rstrip(os.sep).endswith(_SUFFIX)


def _may_be_loaded(path):
    """Returns whether a path is not that of a folder which Keras loads."""
    if not is_folder(path):
        return False
    return checkpoint_folder.exists(path) or not (
        os.path.exists(os.path.join(path, "config.json"))
        or is_orbax_checkpoint(os.fspath(path))
    )


def _refuse(path, **arguments):
    given = {name: value for name, value in arguments.items() if value}
    if given:
        raise ValueError(
            f"A checkpoint in `{_SUFFIX}` is saved and loaded as a whole, by "
            "all processes. These arguments are for files of Keras, such as "
            f"`.weights.h5`: {sorted(given)}. Received: filepath={path!r}"
        )


def _save(path, model, overwrite):
    if overwrite or _may_be_replaced(path):
        checkpoints.save_checkpoint(path, model)


def _may_be_replaced(path):
    """Asks in process 0 whether a folder may be replaced. A collective."""
    lib = backend.load("distribution_lib")
    may = True
    with timeouts.longer():
        if lib.process_id() == 0 and os.path.exists(path):
            may = io_utils.ask_to_proceed_with_overwrite(os.fspath(path))
        return lib.from_first_process(may)


class _Models:
    """Functions of `keras.saving` that take whole models."""

    def save_model(
        original, model, filepath, overwrite=True, zipped=None, **kwargs
    ):
        if zipped is False or not is_folder(filepath):
            return original(model, filepath, overwrite, zipped, **kwargs)
        # Keras ignores it for its own format, too.
        kwargs.pop("include_optimizer", None)
        _refuse(filepath, zipped=zipped, **kwargs)
        _save(filepath, model, overwrite)

    def load_model(
        original, filepath, custom_objects=None, compile=True, safe_mode=True
    ):
        load = original
        if _may_be_loaded(filepath):
            load = checkpoints.load_model
        return load(filepath, custom_objects, compile, safe_mode)


class _Weights:
    """Functions of `keras.saving` that take weights."""

    def save_weights(
        original, model, filepath, overwrite=True, max_shard_size=None, **kwargs
    ):
        if not is_folder(filepath):
            return original(
                model, filepath, overwrite, max_shard_size, **kwargs
            )
        _refuse(filepath, max_shard_size=max_shard_size, **kwargs)
        _save(filepath, model, overwrite)

    def load_weights(original, model, filepath, skip_mismatch=False, **kwargs):
        if not _may_be_loaded(filepath):
            return original(model, filepath, skip_mismatch, **kwargs)
        _refuse(filepath, skip_mismatch=skip_mismatch, **kwargs)
        checkpoints.load_checkpoint(filepath, model)


class _Checkpoint:
    """Methods of `ModelCheckpoint`."""

    def __init__(original, self, filepath, *args, **kwargs):
        if not is_folder(filepath):
            return original(self, filepath, *args, **kwargs)
        # Keras has a list of the endings that it takes.
        given = inspect.signature(original).bind(self, "", *args, **kwargs)
        is_weights = given.arguments.get("save_weights_only")
        name = "a.weights.h5" if is_weights else "a.keras"
        original(self, name, *args, **kwargs)
        self.filepath = os.fspath(filepath)

    def _get_file_path(original, self, *args, **kwargs):
        path = original(self, *args, **kwargs)
        if is_folder(path):
            # Keras fails if another process makes it at the same time.
            os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
        return path


class _Backup:
    """Methods of `BackupAndRestore`.

    Values and progress are one checkpoint. If it is made after some batches of
    an epoch, the resumed run goes on with the batch after them.
    """

    def _load_model(original, self):
        if not is_folder(self.backup_dir):
            return original(self)
        lib = backend.load("distribution_lib")
        self._done = self._saved_after = 0
        resumed_epochs.follow()
        if not lib.from_first_process(
            checkpoint_folder.exists(self.backup_dir)
        ):
            return
        reached = checkpoints.read(self.backup_dir, self.model)
        if reached is None:
            # `model.save` wrote it.
            return
        self.model._initial_epoch = reached["epoch"]
        position = resumed_epochs.Position(*reached["position"])
        if position.done:
            _check_steps(self, position.done, reached["steps"])
            self._last_batch_seen = reached["batch"]
        resumed_epochs.go_on(self.model, position)

    def _save_model(original, self):
        if not is_folder(self.backup_dir):
            return original(self)
        self._saved_after = self._done
        steps = self.params["steps"]
        if steps is not None and self._done >= steps:
            # The end of the epoch saves, when its metrics are known.
            return
        reached = {
            "epoch": self._current_epoch,
            "batch": self._last_batch_seen,
            "steps": steps,
            "position": resumed_epochs.position(self._done),
        }
        checkpoints.write(self.backup_dir, self.model, progress=reached)

    def on_epoch_begin(original, self, epoch, logs=None):
        if is_folder(self.backup_dir):
            # Keras sets it at the end of an epoch only.
            self._current_epoch = epoch
        original(self, epoch, logs)

    def on_train_batch_end(original, self, batch, logs=None):
        self._done = batch + 1
        original(self, batch, logs)

    def on_epoch_end(original, self, epoch, logs=None):
        if not is_folder(self.backup_dir):
            return original(self, epoch, logs)
        was_due = 0 < self._done == self._saved_after
        self._done = self._saved_after = 0
        original(self, epoch, logs)
        if was_due and self.save_freq != "epoch":
            self._save_model()

    def on_train_end(original, self, logs=None):
        if not is_folder(self.backup_dir):
            return original(self, logs)
        lib = backend.load("distribution_lib")
        what = "The end of `fit`, with `BackupAndRestore`,"
        lib.meet(what)
        if lib.process_id() == 0 and self.delete_checkpoint:
            checkpoint_folder.remove(self.backup_dir)
        lib.meet(what)


def _check_steps(callback, done, saved):
    steps = callback.params["steps"]
    if steps != saved:
        raise ValueError(
            f"The backup in '{callback.backup_dir}' was made after {done} of "
            f"{saved} batches of an epoch. Now an epoch has {steps}. Give "
            "`fit` the data and the batch size of the interrupted run, or "
            "remove the folder to train from the start."
        )


_CALLBACKS = "keras.src.callbacks"

TABLE = [
    *(
        methods_row(owner, methods, _ENDING)
        for owner in ("keras.src.saving.saving_api", "keras.saving")
        for methods in (_Models, _Weights)
    ),
    methods_row("keras.models", _Models, _ENDING),
    *(
        methods_row(f"keras._tf_keras.keras.{name}", methods, _ENDING)._replace(
            waits=True
        )
        for name, methods in (
            *(("saving", _Models), ("saving", _Weights), ("models", _Models)),
        )
    ),
    methods_row(
        f"{_CALLBACKS}.model_checkpoint:ModelCheckpoint", _Checkpoint, _ENDING
    ),
    methods_row(
        f"{_CALLBACKS}.backup_and_restore:BackupAndRestore",
        _Backup,
        "values and progress are one checkpoint, of all processes",
    ),
    Hook(
        "keras.src.trainers.epoch_iterator:EpochIterator",
        "_enumerate_iterator",
        resumed_epochs.begin_epoch,
        "a resumed run goes on in the middle of an epoch",
    ),
]
