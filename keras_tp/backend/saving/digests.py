"""Digests in files of weights, so that damage is found before it is loaded.

Each dataset of an HDF5 file has the SHA-256 of its value as an attribute, and
the root group has one over all of these: the seal. Keras ignores both. A file
without a seal, as Keras writes it, is read as well.
"""

import hashlib
import json
import math
import os
import zipfile
import zlib

import h5py
import numpy as np

from keras_tp.backend.saving import file_seal

DIGEST = "keras_tp_sha256"
SEAL = "keras_tp_seal"
PROGRESS = "keras_tp_progress"

# What h5py and `json` raise for files that are damaged.
READING_ERRORS = (
    ArithmeticError,
    AttributeError,
    EOFError,
    LookupError,
    MemoryError,
    OSError,
    RuntimeError,
    SystemError,
    TypeError,
    ValueError,
)

_BLOCK_BYTES = 2**24
# No filter of HDF5 makes data smaller than this, and few chunks are exempt.
_MOST_EXPANSION = 1100
_FEW_BYTES = 2**20


class UnreadableFileError(ValueError, OSError):
    """A file could not be read, where Keras raises an `OSError`.

    `BackupAndRestore` catches it and takes the file before the last.
    """


def note(dataset, value):
    """Adds the digest of a value to the dataset that holds it.

    Args:
        dataset: `h5py.Dataset` that was just written.
        value: The array that was written.
    """
    digest = _begin(dataset)
    digest.update(_bytes(value))
    dataset.attrs[DIGEST] = digest.hexdigest()


def seal(file, progress=None):
    """Adds the digest over all datasets to a file that is open for writing.

    Args:
        file: `h5py.File`.
        progress: Dict that can be written as JSON: how far training came.
            Defaults to `None`.

    Returns:
        The digest, a string.
    """
    if progress is not None:
        file.attrs[PROGRESS] = json.dumps(progress)
    found = _seal_of(file, _datasets(file))
    file.attrs[SEAL] = found
    return found


def progress_of(path):
    """Returns the progress that `seal` put into a file; `None` if nothing.

    Args:
        path: String or path.
    """
    with h5py.File(path) as file:
        found = file.attrs.get(PROGRESS)
    return found and json.loads(found)


def check(file):
    """Compares what a file holds with its digests.

    Sizes are compared before any value is read. Of a file without digests,
    only sizes are.

    Args:
        file: `h5py.File`.

    Returns:
        The seal, a string; `None` where the file has none.

    Raises:
        UnreadableFileError: if something differs, with the dataset.
    """
    found = check_seal(file)
    check_rest(file, ())
    return found


def check_seal(file):
    """Compares sizes, and the list of variables; reads no value.

    Args:
        file: `h5py.File`.

    Returns:
        The seal, a string; `None` where the file has none.

    Raises:
        UnreadableFileError: if something differs.
    """
    try:
        return _check_seal(file)
    except READING_ERRORS as e:
        raise unreadable(e) from e


def check_rest(file, names):
    """Compares the values that were not read yet with their digests.

    Args:
        file: `h5py.File`.
        names: Collection of the names of datasets that were compared.

    Raises:
        UnreadableFileError: if one differs, with the dataset.
    """
    try:
        for name, dataset in _datasets(file).items():
            if dataset.name not in names and DIGEST in dataset.attrs:
                _check_blocks(name, dataset, _blocks(dataset))
    except READING_ERRORS as e:
        raise unreadable(e) from e


def check_value(dataset, value):
    """Compares a value that was read with the digest of its dataset.

    Args:
        dataset: `h5py.Dataset`.
        value: The array that was read from it.

    Returns:
        The name of the dataset.

    Raises:
        UnreadableFileError: if it differs.
    """
    if DIGEST in dataset.attrs:
        _check_blocks(dataset.name, dataset, [value])
    return dataset.name


def check_bytes(path_or_io, archive=None, mode="r"):
    """Compares a file with its checksum, before anything interprets it.

    Args:
        path_or_io: String or path of the file; what is in memory was compared
            when it was read.
        archive: `zipfile.ZipFile` that the file is in. Defaults to `None`.
        mode: String; files that are written, `"w"`, are not compared. Defaults
            to `"r"`.

    Raises:
        UnreadableFileError: if they differ.
    """
    if mode != "r":
        return
    if archive is not None:
        _check_member(archive, path_or_io)
    elif isinstance(path_or_io, (str, os.PathLike)):
        if file_seal.differs(path_or_io):
            raise UnreadableFileError(
                f"The bytes of '{path_or_io}' are not those that were saved: "
                "their SHA-256 differs. Received: "
                f"{os.path.getsize(path_or_io)} bytes"
            )


def _check_member(archive, name):
    try:
        with archive.open(str(name)) as file:
            while file.read(_BLOCK_BYTES):
                pass
    except (*READING_ERRORS, zipfile.BadZipFile, zlib.error) as e:
        raise unreadable(e) from e


def unreadable(error):
    """Returns an error as an `UnreadableFileError`."""
    if isinstance(error, UnreadableFileError):
        return error
    return UnreadableFileError(f"{type(error).__name__}: {error}")


def _check_seal(file):
    datasets = _datasets(file)
    _check_sizes(file, datasets)
    wanted = file.attrs.get(SEAL)
    noted = [name for name, held in datasets.items() if DIGEST in held.attrs]
    if wanted is None and not noted:
        return None
    if wanted != _seal_of(file, datasets):
        raise UnreadableFileError(
            "The file does not hold the variables that were saved: the "
            f"SHA-256 over all of them differs. Received: {len(datasets)} "
            "variables"
        )
    return wanted


def _check_blocks(name, dataset, blocks):
    digest = _begin(dataset)
    for block in blocks:
        digest.update(_bytes(block))
    if digest.hexdigest() != dataset.attrs[DIGEST]:
        raise UnreadableFileError(
            f"The value of {name!r} is not the one that was saved: its "
            f"SHA-256 differs. Received: shape={dataset.shape}, "
            f"dtype={dataset.dtype}"
        )


def _datasets(file):
    found = {}

    def add(name, item):
        if isinstance(item, h5py.Dataset):
            found[name] = item

    file.visititems(add)
    return found


def _check_sizes(file, datasets):
    left = size = file.id.get_filesize()
    for name, dataset in datasets.items():
        if dataset.external or dataset.is_virtual:
            raise UnreadableFileError(
                f"The value of {name!r} is in another file, which is not "
                f"allowed. Received: external={dataset.external}"
            )
        stored = dataset.id.get_storage_size()
        declared = math.prod(dataset.shape) * dataset.dtype.itemsize
        left -= stored
        is_packed = dataset.id.get_create_plist().get_nfilters() > 0
        allowed = stored
        if is_packed:
            allowed = max(_FEW_BYTES, _MOST_EXPANSION * stored)
        if declared > allowed or left < 0:
            raise UnreadableFileError(
                f"The shape of {name!r} needs more bytes than the file holds. "
                f"Received: shape={dataset.shape}, dtype={dataset.dtype}, "
                f"{stored} bytes stored, a file of {size} bytes"
            )


def _begin(dataset):
    """Returns a digest that has taken in the shape and the dtype."""
    head = (dataset.dtype.str, dataset.attrs.get("dtype"), dataset.shape)
    return hashlib.sha256(repr(head).encode())


def _blocks(dataset):
    """Gives the value of a dataset in parts."""
    if not dataset.shape or not dataset.size:
        yield dataset[()]
        return
    row_bytes = dataset.size // len(dataset) * dataset.dtype.itemsize
    step = max(1, _BLOCK_BYTES // row_bytes)
    for start in range(0, len(dataset), step):
        yield dataset[start : start + step]


def _bytes(value):
    value = np.asarray(value)
    if value.dtype.kind in "OU":
        # Strings, which are read as bytes.
        texts = (
            text.encode() if isinstance(text, str) else text
            for text in value.ravel().tolist()
        )
        return b"".join(b"%d:%b" % (len(text), text) for text in texts)
    return np.ascontiguousarray(value).reshape(-1).view(np.uint8)


def _seal_of(file, datasets):
    digests = {
        name: str(dataset.attrs.get(DIGEST))
        for name, dataset in datasets.items()
    }
    sealed = [sorted(digests.items()), file.attrs.get(PROGRESS)]
    return hashlib.sha256(json.dumps(sealed).encode()).hexdigest()
