"""Compares weights with their digests while they are loaded, part by part.

A large array stays in its file until a variable takes it: then each process
reads the parts that its devices hold.
"""

import contextlib
import os

import h5py
from keras.src import backend
from keras.src.backend.common.stateless_scope import get_stateless_scope
from keras.src.backend.common.stateless_scope import in_stateless_scope
from keras.src.saving import saving_lib

from keras_tp.backend import current
from keras_tp.backend.saving import archives
from keras_tp.backend.saving import boxes
from keras_tp.backend.saving import digests
from keras_tp.backend.saving import expected_values
from keras_tp.backend.saving import sharded_files
from keras_tp.backend.saving import stored_arrays
from keras_tp.backend.saving import tensor_files

# Suffixes of Keras's older formats.
LEGACY = (".h5", ".hdf5")


class _Loads:
    """The loads that are under way.

    Attributes:
        read: List of the loads that are checked, as `Reading`.
        in_parts: List of the loads that leave large arrays in their file, as
            the path of an archive in which the weights stay, or `None`.
        opened: Dict from each open store to the names of the values compared
            so far, or to `None` if it has no values to compare.
    """

    def reset(self):
        """Forgets all loads."""
        self.read = []
        self.in_parts = []
        self.opened = {}

    __init__ = reset


class Reading:
    """A load in which values are compared with their digests.

    Attributes:
        see: Function of the name of a value in its file, and of the array.
        share: Pair: the index of this process, and the number of processes
            that divide the large arrays among them.
        last: The array that was read last.
        is_own: Boolean, whether it is this process that compares it.
    """

    def __init__(self, see, share):
        self.see = see
        self.share = share
        self.last = None
        self.is_own = True
        self._takers = {}

    def take(self, name, value):
        """Notes an array; returns whether this process compares it."""
        self.last, self.is_own = value, True
        if stored_arrays.is_stored(value):
            index, count = self.share
            # Keras may read a value again, after an error.
            taker = self._takers.setdefault(name, len(self._takers) % count)
            self.is_own = taker == index
        if self.is_own:
            self.see(name, value)
        return self.is_own


_loads = _Loads()


@contextlib.contextmanager
def checking(filepath, see=lambda name, value: None, share=(0, 1)):
    """Context in which the files of a model are compared with their digests.

    A value of a weights file is compared when it is read. Values that were not
    read are compared when the file is closed. Yields a `Reading`.

    Args:
        filepath: What `keras.saving.load_model` or `load_weights` receives.
        see: Function of the name of a value in its weights file, and of the
            array, called in the process that compares it. Defaults to nothing.
        share: Pair: the index of this process, and the number of processes
            that divide the large arrays among them. Defaults to one process.
    """
    path = filepath
    if isinstance(path, os.PathLike):
        path = os.fspath(path)
    # Keras copies a remote file, and the store of the copy is compared.
    if isinstance(path, str) and os.path.exists(path):
        if path.endswith("weights.json"):
            sharded_files.check(path, share)
        elif os.path.isdir(path):
            digests.check_folder(path)
        elif path.endswith(LEGACY):
            digests.check_bytes(path)
    reading = Reading(see, share)
    _loads.read.append(reading)
    opened = len(_loads.opened)
    try:
        yield reading
    finally:
        _loads.read.pop()
        # Keras leaves a file open if loading fails. HDF5 would then reuse its
        # cached content for the next file of that name.
        for store in list(_loads.opened)[opened:]:
            if store.h5_file:
                store.h5_file.close()
            del _loads.opened[store]


@contextlib.contextmanager
def in_parts(archive=None):
    """Context in which a process reads its parts of large arrays only.

    Args:
        archive: Path of a `.keras` file that `archives.check` compared, in
            which the weights stay. Defaults to `None`.
    """
    _loads.in_parts.append(archive and os.path.realpath(archive))
    try:
        yield
    finally:
        _loads.in_parts.pop()


def stays_in_archive():
    """Returns whether the weights of the model that is loaded stay there."""
    return bool(_loads.in_parts) and _loads.in_parts[-1] is not None


def check_rest(store):
    """Compares what was not read of a store that is about to be closed."""
    compared = _loads.opened.get(store)
    if compared is not None and store.h5_file:
        share = _loads.read[-1].share
        digests.check_rest(store.h5_file, compared, share)


def _is_in_place(archive=None, mode="r"):
    """Returns whether weights in an archive are read where they are."""
    path = getattr(archive, "filename", None)
    if path is None or mode != "r":
        return False
    return os.path.realpath(path) in _loads.in_parts


class Store:
    """The methods of a store of weights that compare digests."""

    def __init__(original, self, path_or_io, *args, **kwargs):
        if not _loads.read:
            original(self, path_or_io, *args, **kwargs)
            return
        with digests.reading():
            # Must run before HDF5 reads the file.
            if not _is_in_place(*args, **kwargs):
                digests.check_bytes(path_or_io, *args, **kwargs)
            original(self, path_or_io, *args, **kwargs)
        _loads.opened[self] = None
        if self.mode == "r":
            digests.check_seal(self.h5_file)
            _loads.opened[self] = set()

    def _get_h5_file(original, self, path_or_io, mode=None):
        part = None
        if _is_in_place(self.archive, mode or self.mode):
            part = archives.stored_part(self.archive, path_or_io)
        if part is None:
            return original(self, path_or_io, mode)
        self.io_file = part
        return h5py.File(part, "r")

    def __getitem__(original, self, key):
        value = None
        if _loads.in_parts:
            group = self._h5_entry_group
            dataset = saving_lib.safe_get_h5_dataset(group, key)
            part = self.io_file
            if not isinstance(part, archives.Part):
                part = None
            value = stored_arrays.of_dataset(dataset, part)
        if value is None:
            value = original(self, key)
        if _loads.read:
            # A store of several files was compared as a whole.
            compared = _loads.opened.setdefault(self, None)
            dataset = self._h5_entry_group[key]
            is_own = _loads.read[-1].take(dataset.name, value)
            if compared is not None:
                compared.add(dataset.name)
                if is_own:
                    digests.check_value(dataset, value)
        return value


class Variable:
    """The method of a variable that takes an array which is in a file."""

    def assign(original, self, value):
        if in_stateless_scope():
            return _assign(original, self, value)
        with expected_values.loaded(self):
            return _assign(original, self, value)


def _assign(original, self, value):
    """Assigns an array; of one that is in a file, each process its parts."""
    if not stored_arrays.is_stored(value):
        return original(self, value)
    dtype = backend.standardize_dtype(self._dtype)
    is_alike = value.shape == tuple(self.shape)
    if is_alike and getattr(get_stateless_scope(), "takes_arrays", False):
        get_stateless_scope().add_update((self, value))
        return value
    can_be_read = is_alike and stored_arrays.can_become(value, dtype)
    if self._layout is None or not can_be_read or in_stateless_scope():
        return original(self, stored_arrays.read(value))

    def part_of(ranges):
        return boxes.read_part(
            ranges,
            tensor_files.numpy_dtype(dtype),
            lambda target, box: stored_arrays.copy_to(
                target, value, tuple(slice(*limits) for limits in box)
            ),
        )

    current.load("distribution_lib").assign_parts(self, part_of)
    return value
