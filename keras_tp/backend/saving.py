"""All processes gather what is saved, and one of them writes.

It writes to a file beside the one that is named, and then puts it in its
place: a process that ends midway leaves the older file as it was.
"""

import contextlib
import functools
import json
import os
import tempfile

import h5py
from keras.src import backend
from keras.src.distribution.distribution_lib import distribution

from keras_tp.backend import files
from keras_tp.backend.hooks import Hook

# What Keras writes as one file.
_FILES = (".keras", ".h5", ".hdf5")
_SAVING = "Saving, in which only one process writes the files,"


def table(processes, is_distributed):
    """Returns the rows of a hook table.

    Args:
        processes: The backend's module of that name, with `meet`, `longer`,
            `is_first` and `world_size`.
        is_distributed: Function of a model: whether its variables are split
            over processes.
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
            "keras.src.saving.saving_lib:H5IOStore",
            "__setitem__",
            _store_once,
            "processes that do not write keep no copy of the model",
        ),
    ]


def _save_once(processes, is_distributed, original):
    """All processes gather, one of them writes."""

    @functools.wraps(original)
    def save(model, filepath, *args, **kwargs):
        if not isinstance(filepath, (str, os.PathLike)):
            return original(model, filepath, *args, **kwargs)
        if processes.world_size() == 1 or not (
            is_distributed(model) or _has_only_a_distribution(model)
        ):
            place = _beside if has_a_layout(model) else contextlib.nullcontext
            with place(filepath) as path:
                result = original(model, path, *args, **kwargs)
                _note(path)
                return result
        processes.meet(_SAVING)
        place = _beside if processes.is_first() else _nowhere
        with processes.longer():
            with place(filepath) as path:
                result = original(model, path, *args, **kwargs)
                _note(path)
                # If a process ended meanwhile, the older file stays.
                processes.meet(_SAVING)
            # Whoever loads the file next finds it complete.
            processes.meet(_SAVING)
        return result

    return save


@contextlib.contextmanager
def noting(progress):
    """Files of weights that are written meanwhile hold how far training came.

    In one file it is as new as the weights are, wherever a save is cut short.

    Args:
        progress: Dict of string to int.
    """
    _noted.append(progress)
    try:
        yield
    finally:
        _noted.pop()


_noted = []
_PROGRESS = "keras_tp_progress"


def _note(path):
    if _noted:
        with h5py.File(path, "a") as file:
            file.attrs[_PROGRESS] = json.dumps(_noted[-1])


def noted_progress(path):
    """Returns what `noting` put into a file of weights; `None` if nothing."""
    with h5py.File(path) as file:
        found = file.attrs.get(_PROGRESS)
    return found and json.loads(found)


def has_a_layout(model):
    """Whether a model is laid out here; another is saved as Keras does."""
    return distribution() is not None or any(
        variable._layout is not None for variable in model.variables
    )


def _has_only_a_distribution(model):
    """Whether a model without variables is one model of all processes."""
    return distribution() is not None and not model.variables


@contextlib.contextmanager
def _beside(filepath):
    """Gives the path to write to, and then puts what is there in its place."""
    path = os.path.realpath(filepath)
    folder, name = os.path.split(path)
    if (
        not name.endswith(_FILES)
        or os.path.isdir(path)
        or not os.path.isdir(folder)
    ):
        # A folder, or files of several parts, or elsewhere.
        yield filepath
        return
    with files.replaced(path) as new:
        yield new


@contextlib.contextmanager
def _nowhere(filepath):
    """Gives a path where an empty file is written, and then nothing is."""
    _joining.append(True)
    try:
        with tempfile.TemporaryDirectory() as folder:
            yield os.path.join(folder, os.path.basename(os.fspath(filepath)))
    finally:
        _joining.pop()


_joining = []


def _by_file(processes, is_distributed, original):
    """Keras otherwise reads a `.keras` file as a whole, or makes it so."""

    @functools.wraps(original)
    def is_memory_sufficient(model):
        if processes.world_size() > 1 and is_distributed(model):
            return False
        return original(model)

    return is_memory_sufficient


def _store_once(original):
    """Who does not write, only gathers."""

    @functools.wraps(original)
    def __setitem__(self, key, value):
        if _joining:
            backend.convert_to_numpy(value)
            return
        original(self, key, value)

    return __setitem__
