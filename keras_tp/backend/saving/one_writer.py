"""Saves a model in one process, after all processes have gathered its values.

The process writes to a temporary file, and then moves it into place. If it ends
midway, the older file stays as it was.
"""

import contextlib
import functools
import os
import pathlib
import tempfile

from keras.src import backend
from keras.src.distribution.distribution_lib import distribution

from keras_tp.backend import current
from keras_tp.backend.hooks import Hook
from keras_tp.backend.hooks import methods_row
from keras_tp.backend.processes import timeouts
from keras_tp.backend.saving import atomic_files
from keras_tp.backend.saving import checked_reads
from keras_tp.backend.saving import digests
from keras_tp.backend.saving import file_seal
from keras_tp.backend.saving import sharded_files
from keras_tp.backend.saving import streamed_values

# Suffixes of the formats that Keras writes as one file.
_FILES = (".keras", *checked_reads.LEGACY)
# What Keras writes into the folder of an unpacked model.
_CONFIG, _METADATA = "config.json", "metadata.json"
_FOLDER = {_CONFIG, _METADATA, "model.weights.h5", "assets"}
_SAVING = "Saving, in which only one process writes the files,"


class _Saves:
    """The saves that are under way.

    Attributes:
        sealing: Int. Number of saves in which this process writes digests.
        joining: Int. Number of saves in which it only gathers values.
        progress: List of the progress of training to store; see `noting`.
    """

    def reset(self):
        """Forgets all saves."""
        self.sealing = self.joining = 0
        self.progress = []

    __init__ = reset


_saves = _Saves()


def table(is_distributed, exporting=contextlib.nullcontext):
    """Returns the rows of a hook table.

    Args:
        is_distributed: Function of a model. Returns whether its variables are
            split over processes.
        exporting: Context manager of a model that is exported. Defaults to
            one that does nothing.
    """
    save = functools.partial(_save_once, is_distributed)

    class Formats:
        def save_model(original, *args, **kwargs):
            return save(original, _in_place, *args, **kwargs)

        def save_weights_only(original, model, filepath, *args, **kwargs):
            is_parts = args[0] if args else kwargs.get("max_shard_size")
            place = _parts_in_place if is_parts else _in_place
            return save(original, place, model, filepath, *args, **kwargs)

        def is_memory_sufficient(original, model):
            if checked_reads.stays_in_archive():
                # Keras catches any error, and then makes no copy.
                raise MemoryError("Neither memory nor disk holds a copy.")
            # The whole file would be in memory.
            is_split = _processes().world_size() > 1 and is_distributed(model)
            return not is_split and original(model)

    class Model:
        def export(original, model, filepath, *args, **kwargs):
            def write(model, *args, **kwargs):
                with exporting(model):
                    return original(model, *args, **kwargs)

            is_one = _processes().world_size() == 1
            if is_one or not _meets(is_distributed, model):
                return write(model, filepath, *args, **kwargs)
            return _by_first(
                write, contextlib.nullcontext, model, filepath, args, kwargs
            )

    class LegacyFormat:
        def save_model_to_hdf5(original, *args, **kwargs):
            return save(original, _legacy_in_place, *args, **kwargs)

        load_weights_from_hdf5_group = _check_group
        load_weights_from_hdf5_group_by_name = _check_group

    class Adapters:
        def save_lora_weights(original, model, filepath):
            return save(original, _in_place, model, filepath)

        def load_lora_weights(original, model, filepath):
            with checked_reads.checking(filepath):
                return original(model, filepath)

    rows = [
        methods_row(owner, methods, why)
        for owner, methods, why in (
            (
                "keras.src.saving.saving_lib",
                Formats,
                "all processes gather the values and one process writes them",
            ),
            (
                "keras.src.models.model:Model",
                Model,
                "one process writes a program, which needs no mesh",
            ),
            (
                "keras.src.legacy.saving.legacy_h5_format",
                LegacyFormat,
                "all processes gather the values and one process writes them",
            ),
            (
                "keras.src.saving.saving_lib:H5IOStore",
                _Store,
                "values are saved and loaded with digests",
            ),
            (
                "keras.src.saving.saving_lib:ShardedH5IOStore",
                _Parts,
                "no process has to hold all of a variable that it saves",
            ),
            (
                "keras.src.saving.saving_lib:H5IOStore",
                checked_reads.Store,
                "a damaged file is found before a value is loaded",
            ),
            (
                "keras.src.backend:Variable",
                checked_reads.Variable,
                "a process reads its part of a large array in a file",
            ),
        )
    ]
    adapters = methods_row(
        "keras_hub.src.models.backbone:Backbone",
        Adapters,
        "all processes gather the adapters and one process writes them",
    )
    arrays = Hook(
        "keras.src.saving.saving_lib",
        "backend",
        streamed_values.Backend,
        "a store takes a variable that is written in pieces",
    )
    return [*rows, arrays, adapters._replace(waits=True)]


def _processes():
    return current.load("processes")


def _save_once(
    is_distributed, original, in_place, model, filepath, *args, **kwargs
):
    """Makes all processes gather the values, and process 0 write them."""
    if not isinstance(filepath, (str, os.PathLike)):
        return original(model, filepath, *args, **kwargs)
    processes = _processes()
    is_one = processes.world_size() == 1
    if is_one or not _meets(is_distributed, model):
        place = in_place if has_a_layout(model) else contextlib.nullcontext
        with place(filepath) as path:
            return original(model, path, *args, **kwargs)
    return _by_first(original, in_place, model, filepath, args, kwargs)


def _meets(is_distributed, model):
    """Whether all processes of a run save a model together."""
    has_no_variables = distribution() is not None and not model.variables
    return is_distributed(model) or has_no_variables


def _by_first(original, in_place, model, filepath, args, kwargs):
    """Makes process 0 write to a path, and the others to a temporary one."""
    processes = _processes()
    processes.meet(_SAVING)
    place = in_place if processes.is_first() else nowhere
    with timeouts.longer():
        with place(filepath) as path:
            result = original(model, path, *args, **kwargs)
            # If a process ended meanwhile, the older file stays.
            processes.meet(_SAVING)
        # From here on, every process can load the complete file.
        processes.meet(_SAVING)
    return result


def has_a_layout(model):
    """Whether a model has layouts. Other models are saved as Keras does."""
    return distribution() is not None or any(
        variable._layout is not None for variable in model.variables
    )


@contextlib.contextmanager
def noting(progress):
    """Context in which weights files also store the progress of training.

    In the same file, progress and weights always match, even if a save is
    interrupted.
    """
    _saves.progress.append(progress)
    try:
        yield
    finally:
        _saves.progress.pop()


@contextlib.contextmanager
def _in_place(filepath):
    """Yields a path to write to, then moves the file into place."""
    path = os.path.realpath(filepath)
    _saves.sealing += 1
    try:
        if not os.path.isdir(os.path.dirname(path)):
            # Keras creates the folder, or writes to a remote one.
            yield filepath
        elif not path.endswith(_FILES):
            with _folder_in_place(pathlib.Path(path)) as new:
                yield new
        elif os.path.isdir(path):
            # Keras raises an error.
            yield filepath
        else:
            with atomic_files.replaced(path) as new:
                yield new
    finally:
        _saves.sealing -= 1


@contextlib.contextmanager
def _folder_in_place(path):
    """Yields a folder for an unpacked model, then moves it into place."""
    beside = path
    if os.path.ismount(path) or not os.access(path.parent, os.W_OK):
        beside = path / path.name
    with atomic_files.folder_beside(beside) as folder:
        new = folder / path.name
        with atomic_files.full_disk_named(path):
            yield str(new)
            digests.note_folder(new)
        _put_folder(new, path)


def _put_folder(new, path):
    """Moves the folder of an unpacked model into place.

    A folder that holds something else, or that cannot be exchanged on its file
    system, gets the new files one after the other. The metadata, which is the
    first, has the digest of the config, which is the last: if this process ends
    in between and the config differs from the earlier one, loading fails.
    """
    files = [file for file in new.rglob("*") if file.is_file()]
    for file in files:
        atomic_files.flush(file)
    if not path.exists():
        os.replace(new, path)
        atomic_files.flush(path.parent)
        return
    is_in_use = pathlib.Path.cwd().is_relative_to(path)
    holds_more = not _FOLDER.issuperset(os.listdir(path))
    if not is_in_use and not holds_more and atomic_files.exchange(new, path):
        return
    files.sort(key=lambda file: (file == new / _CONFIG, file.name != _METADATA))
    for file in files:
        target = path / file.relative_to(new)
        target.parent.mkdir(parents=True, exist_ok=True)
        atomic_files.put(file, target)


@contextlib.contextmanager
def _legacy_in_place(filepath):
    with _in_place(filepath) as path:
        yield path
        if os.path.isfile(path):
            file_seal.append(path, with_values=True)


@contextlib.contextmanager
def _parts_in_place(filepath):
    _saves.sealing += 1
    try:
        with sharded_files.replaced(os.path.realpath(filepath)) as path:
            yield path
    finally:
        _saves.sealing -= 1


@contextlib.contextmanager
def nowhere(filepath):
    """Yields a path in a temporary folder, for processes that only gather."""
    _saves.joining += 1
    try:
        with tempfile.TemporaryDirectory() as folder:
            yield os.path.join(folder, os.path.basename(os.fspath(filepath)))
    finally:
        _saves.joining -= 1


def _check_group(original, group, model, *args, **kwargs):
    """Compares a legacy file with its digest before weights are assigned."""
    if has_a_layout(model):
        digests.check_bytes(group.file.filename)
    return original(group, model, *args, **kwargs)


def _write_pieces(store, key, streamed):
    """Writes a split variable; no process has to hold all of it."""
    group = None
    if not _saves.joining:
        if not store._h5_entry_initialized:
            store._create_h5_group(store._h5_entry_path)
        group = store._h5_entry_group
    dataset = streamed_values.write(streamed, group, key)
    if dataset is not None:
        digests.note_written(dataset)


class _Parts:
    """The method of a store of several files, which asks for the size first."""

    def __setitem__(original, self, key, value):
        streamed = None
        if _saves.sealing or _saves.joining:
            streamed = streamed_values.of(value)
        original(self, key, value if streamed is None else streamed)


class _Store:
    """The methods of a store of weights that write digests."""

    def __setitem__(original, self, key, value):
        """Gathers a value in all processes, and writes it in process 0."""
        if not _saves.sealing and not _saves.joining:
            original(self, key, value)
            return
        streamed = streamed_values.of(value)
        if streamed is not None:
            _write_pieces(self, key, streamed)
            return
        value = backend.convert_to_numpy(value)
        if _saves.joining:
            return
        original(self, key, value)
        digests.note(self._h5_entry_group[key], value)

    def close(original, self):
        # h5py reports the mode of a file opened with "w" as "r+".
        file = self.h5_file
        if not _saves.sealing or not file or file.mode != "r+":
            try:
                checked_reads.check_rest(self)
            finally:
                original(self)
            return
        digests.seal(file, _saves.progress[-1] if _saves.progress else None)
        path = file.filename
        original(self)
        if self.io_file is None:
            file_seal.append(path)
