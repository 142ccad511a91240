"""Saves a model in one process, after all processes have gathered its values.

The process writes to a temporary file, and then moves it into place. If it ends
midway, the older file stays as it was.
"""

import contextlib
import functools
import os
import tempfile

from keras.src import backend
from keras.src.distribution.distribution_lib import distribution

from keras_tp.backend.hooks import Hook
from keras_tp.backend.saving import atomic_files
from keras_tp.backend.saving import digests
from keras_tp.backend.saving import file_seal
from keras_tp.backend.saving import sharded_files

# Suffixes of the formats that Keras writes as one file.
_FILES = (".keras", ".h5", ".hdf5")
_STORE = "keras.src.saving.saving_lib:H5IOStore"
_STORE_OF_PARTS = "keras.src.saving.saving_lib:ShardedH5IOStore"
_DAMAGE = "damage is found before anything is loaded"
_SEAL = "a variable that is missing in the file is found"
_SAVING = "Saving, in which only one process writes the files,"


def table(processes, is_distributed):
    """Returns the rows of a hook table.

    Args:
        processes: The backend's `processes` module, with `meet`, `longer`,
            `is_first` and `world_size`.
        is_distributed: Function of a model. Returns whether its variables are
            split over processes.
    """
    return [
        *(
            Hook(
                owner,
                name,
                functools.partial(_save_once, processes, is_distributed),
                "all processes gather and one writes",
            )
            for owner, name in (
                ("keras.src.saving.saving_lib", "save_model"),
                ("keras.src.saving.saving_lib", "save_weights_only"),
                (
                    "keras.src.legacy.saving.legacy_h5_format",
                    "save_model_to_hdf5",
                ),
            )
        ),
        Hook(
            "keras.src.saving.saving_lib",
            "is_memory_sufficient",
            functools.partial(_by_file, processes, is_distributed),
            "files of models that are distributed are not read into memory",
        ),
        Hook(
            _STORE,
            "__setitem__",
            _store_once,
            "one process writes, and adds digests",
        ),
        Hook(
            _STORE,
            "__getitem__",
            _note_read,
            "a value of another kind is found before it is converted",
        ),
        *(
            Hook(store, name, hook, why)
            for store, name, hook, why in (
                (_STORE, "__init__", _check_store, _DAMAGE),
                (_STORE_OF_PARTS, "__init__", _check_parts, _DAMAGE),
                (_STORE, "close", _seal_store, _SEAL),
                (_STORE_OF_PARTS, "close", _seal_store, _SEAL),
            )
        ),
    ]


def _save_once(processes, is_distributed, original):
    """Makes all processes gather the values, and process 0 write them."""

    @functools.wraps(original)
    def save(model, filepath, *args, **kwargs):
        if not isinstance(filepath, (str, os.PathLike)):
            return original(model, filepath, *args, **kwargs)
        is_parts = original.__name__ == "save_weights_only" and (
            args[0] if args else kwargs.get("max_shard_size")
        )
        in_place = functools.partial(_beside, is_parts=is_parts)
        if processes.world_size() == 1 or not (
            is_distributed(model) or _has_only_a_distribution(model)
        ):
            place = in_place if has_a_layout(model) else contextlib.nullcontext
            with place(filepath) as path:
                return original(model, path, *args, **kwargs)
        processes.meet(_SAVING)
        place = in_place if processes.is_first() else _nowhere
        with processes.longer():
            with place(filepath) as path:
                result = original(model, path, *args, **kwargs)
                # If a process ended meanwhile, the older file stays.
                processes.meet(_SAVING)
            # From here on, every process can load the complete file.
            processes.meet(_SAVING)
        return result

    return save


@contextlib.contextmanager
def noting(progress):
    """Context in which weights files also store the progress of training.

    In the same file, progress and weights always match, even if a save is
    interrupted.

    Args:
        progress: Dict that can be written as JSON.
    """
    _noted.append(progress)
    try:
        yield
    finally:
        _noted.pop()


_noted = []


@contextlib.contextmanager
def checking():
    """Context in which weights files are compared with their digests.

    A value is compared when it is read. Values that were not read are compared
    when the file is closed. Yields a list that holds the array read last.
    """
    _checking.append([])
    opened = len(_opened)
    try:
        yield _checking[-1]
    finally:
        _checking.pop()
        # Keras leaves a file open if loading fails. HDF5 would then reuse its
        # cached content for the next file of that name.
        for store in list(_opened)[opened:]:
            if store.h5_file:
                store.h5_file.close()
            del _opened[store]


_checking = []
# Maps each open store to the names of the values compared so far, or to `None`
# if it has no values to compare.
_opened = {}


def has_a_layout(model):
    """Whether a model has layouts. Other models are saved as Keras does."""
    return distribution() is not None or any(
        variable._layout is not None for variable in model.variables
    )


def _has_only_a_distribution(model):
    """Whether a model has no variables, but belongs to a distribution."""
    return distribution() is not None and not model.variables


@contextlib.contextmanager
def _beside(filepath, is_parts):
    """Yields a path to write to, then moves the files into place."""
    _sealing.append(True)
    try:
        with _in_place_of(filepath, is_parts) as path:
            yield path
    finally:
        _sealing.pop()


_sealing = []


@contextlib.contextmanager
def _in_place_of(filepath, is_parts):
    path = os.path.realpath(filepath)
    folder, name = os.path.split(path)
    if is_parts and os.path.isdir(folder):
        with sharded_files.replaced(path) as new:
            yield new
        return
    if (
        not name.endswith(_FILES)
        or os.path.isdir(path)
        or not os.path.isdir(folder)
    ):
        # A folder, or a path whose parent is not a local folder.
        yield filepath
        return
    with atomic_files.replaced(path) as new:
        yield new


@contextlib.contextmanager
def _nowhere(filepath):
    """Yields a path in a temporary folder, for processes that only gather."""
    _joining.append(True)
    try:
        with tempfile.TemporaryDirectory() as folder:
            yield os.path.join(folder, os.path.basename(os.fspath(filepath)))
    finally:
        _joining.pop()


_joining = []


def _by_file(processes, is_distributed, original):
    """Stops Keras from holding a distributed model's whole file in memory."""

    @functools.wraps(original)
    def is_memory_sufficient(model):
        if processes.world_size() > 1 and is_distributed(model):
            return False
        return original(model)

    return is_memory_sufficient


def _store_once(original):
    """Gathers a value in all processes, and writes it in process 0."""

    @functools.wraps(original)
    def __setitem__(self, key, value):
        if not _sealing and not _joining:
            original(self, key, value)
            return
        value = backend.convert_to_numpy(value)
        if _joining:
            return
        original(self, key, value)
        digests.note(self._h5_entry_group[key], value)

    return __setitem__


def _note_read(original):
    @functools.wraps(original)
    def __getitem__(self, key):
        value = original(self, key)
        if not _checking:
            return value
        compared = _opened.get(self)
        if compared is not None:
            dataset = self._h5_entry_group[key]
            compared.add(digests.check_value(dataset, value))
        _checking[-1][:] = [value]
        return value

    return __getitem__


def _check_store(original):
    @functools.wraps(original)
    def __init__(self, path_or_io, *args, **kwargs):
        if not _checking:
            original(self, path_or_io, *args, **kwargs)
            return
        try:
            # Must run before HDF5 reads the file.
            digests.check_bytes(path_or_io, *args, **kwargs)
            original(self, path_or_io, *args, **kwargs)
        except FileNotFoundError:
            raise
        except digests.READING_ERRORS as e:
            raise digests.unreadable(e) from e
        _opened[self] = None
        if self.mode == "r":
            digests.check_seal(self.h5_file)
            _opened[self] = set()

    return __init__


def _check_parts(original):
    @functools.wraps(original)
    def __init__(self, path_or_io, *args, **kwargs):
        if _checking:
            sharded_files.check(path_or_io)
        original(self, path_or_io, *args, **kwargs)
        if _checking:
            _opened[self] = None

    return __init__


def _seal_store(original):
    @functools.wraps(original)
    def close(self):
        # h5py reports the mode of a file opened with "w" as "r+".
        file = self.h5_file
        compared = _opened.get(self)
        if compared is not None and file:
            try:
                digests.check_rest(file, compared)
            finally:
                original(self)
            return
        if not _sealing or not file or file.mode != "r+":
            original(self)
            return
        digests.seal(file, _noted[-1] if _noted else None)
        path = file.filename
        original(self)
        if self.io_file is None:
            file_seal.append(path)

    return close
