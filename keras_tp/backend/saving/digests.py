"""Adds digests to weights files, so that damage is found before loading.

Each dataset of an HDF5 file has the SHA-256 of its value as an attribute. The
root group has a SHA-256 over all of these digests: the seal. Keras ignores
both. A file without a seal, such as Keras writes, can be read, too.
"""

import contextlib
import hashlib
import json
import math
import os
import pathlib
import zipfile
import zlib

import h5py
import numpy as np

from keras_tp.backend.saving import atomic_files
from keras_tp.backend.saving import file_seal
from keras_tp.backend.saving import stored_arrays

# A file that Keras writes into the folder of an unpacked model and never reads.
# The digests of the other files are added to it, and a digest over these.
_METADATA, _CONFIG = "metadata.json", "config.json"
_FILES = "keras_tp_files"
_FILES_SEAL = "keras_tp_sha256"

DIGEST = "keras_tp_sha256"
SEAL = "keras_tp_seal"
PROGRESS = "keras_tp_progress"

# Errors that h5py, `json` and `zipfile` raise for damaged files.
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
    zipfile.BadZipFile,
    zlib.error,
)

_BLOCK_BYTES = 2**24
_SMALL_BLOCK_BYTES = 2**20
# Filters of HDF5 compress data by less than this factor. Compressed datasets of
# up to `_FEW_BYTES` are exempt.
_MOST_EXPANSION = 1100
_FEW_BYTES = 2**20


class UnreadableFileError(ValueError, OSError):
    """Raised for an unreadable file, in places where Keras raises `OSError`.

    `BackupAndRestore` catches it and loads the previous file.
    """


@contextlib.contextmanager
def reading():
    """Context that raises errors of damaged files as `UnreadableFileError`."""
    try:
        yield
    except (FileNotFoundError, UnreadableFileError):
        raise
    except READING_ERRORS as e:
        raise UnreadableFileError(f"{type(e).__name__}: {e}") from e


def note(dataset, value):
    """Adds the digest of a value that was just written to its dataset."""
    dataset.attrs[DIGEST] = _digest_of_blocks(dataset, [value])


def note_written(dataset):
    """Adds the digest of a value that was written in pieces."""
    blocks = _blocks(dataset, _SMALL_BLOCK_BYTES)
    dataset.attrs[DIGEST] = _digest_of_blocks(dataset, blocks)


def seal(file, progress=None):
    """Adds the digest over all datasets to a file that is open for writing.

    Args:
        file: `h5py.File`.
        progress: Dict. Progress of training, in types that JSON supports.
            Defaults to `None`.

    Returns:
        String. The digest.
    """
    if progress is not None:
        file.attrs[PROGRESS] = json.dumps(progress)
    found = _seal_of(file, _datasets(file))
    file.attrs[SEAL] = found
    return found


def progress_of(path):
    """Returns the progress that `seal` wrote to a file, or `None`."""
    with h5py.File(path) as file:
        found = file.attrs.get(PROGRESS)
    return found and json.loads(found)


def check(file):
    """Compares the content of a file with its digests; returns the seal.

    Sizes are checked before any value is read. In a file without digests, only
    sizes are checked, and the result is `None`.

    Raises:
        UnreadableFileError: if something differs, with the dataset's name.
    """
    found = check_seal(file)
    check_rest(file, ())
    return found


@reading()
def check_seal(file):
    """Checks sizes and the list of variables, without reading values.

    Returns and raises as `check` does.
    """
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


@reading()
def check_rest(file, names, share=(0, 1)):
    """Compares the values that were not compared yet with their digests.

    Args:
        file: `h5py.File`.
        names: Collection of the names of datasets that were compared.
        share: Pair: the index of this process, and the number of processes
            that divide the values among them. Defaults to one process.
    """
    rest = [
        (name, dataset)
        for name, dataset in _datasets(file).items()
        if dataset.name not in names and DIGEST in dataset.attrs
    ]
    for name, dataset in rest[share[0] :: share[1]]:
        _check_blocks(name, dataset, _blocks(dataset))


def check_value(dataset, value):
    """Compares a value with the digest of its dataset."""
    if DIGEST in dataset.attrs:
        blocks = [value]
        if stored_arrays.is_stored(value):
            blocks = stored_arrays.blocks(value)
        _check_blocks(dataset.name, dataset, blocks)


@reading()
def identity(path):
    """Returns a digest that copies of one file have in common.

    Of a weights file: its size, and for each value its digest or, in a file
    without digests, its first row. Of a `.keras` file: the checksums of its
    weights and assets.
    """
    path = pathlib.Path(path)
    if not h5py.is_hdf5(path):
        if not path.is_file():
            return None
        if not zipfile.is_zipfile(path):
            return _digest_of(path)
        with zipfile.ZipFile(path) as archive:
            held = archive.infolist()
            # Metadata has the time of the save, the config ids of objects.
            own = (_METADATA, _CONFIG)
            return digest_of_json(
                [(m.filename, m.CRC) for m in held if m.filename not in own]
            )
    with h5py.File(path) as file:
        found = [
            (name, dataset.attrs.get(DIGEST) or _first_row_of(dataset))
            for name, dataset in _datasets(file).items()
        ]
        return digest_of_json([file.id.get_filesize(), found])


def _first_row_of(dataset):
    if not dataset.size:
        return ""
    row = dataset[(0,) * (dataset.ndim - 1)]
    return hashlib.sha256(_bytes(row)).hexdigest()


def check_bytes(path_or_io, archive=None, mode="r"):
    """Compares a file with its checksum, before anything interprets it.

    Args:
        path_or_io: String or path of the file. A file in memory is skipped,
            because it was compared when it was read.
        archive: `zipfile.ZipFile` that contains the file. Defaults to `None`.
        mode: String. Files opened for writing (`"w"`) are skipped. Defaults to
            `"r"`.

    Raises:
        UnreadableFileError: if the checksum differs.
    """
    if mode != "r":
        return
    if archive is not None:
        with reading(), archive.open(str(path_or_io)) as file:
            # The end of the member is where `zipfile` compares its checksum.
            while file.read(_BLOCK_BYTES):
                pass
    elif isinstance(path_or_io, (str, os.PathLike)):
        if file_seal.differs(path_or_io):
            raise UnreadableFileError(
                f"The bytes of '{path_or_io}' are not those that were saved: "
                "their SHA-256 differs. Received: "
                f"{os.path.getsize(path_or_io)} bytes"
            )


def note_folder(path):
    """Adds the digests of the config and the assets of an unpacked model.

    The weights file has digests of its own.
    """
    folder = pathlib.Path(path)
    written = [folder / _CONFIG, *sorted((folder / "assets").rglob("*"))]
    held = json.loads((folder / _METADATA).read_bytes())
    held[_FILES] = {
        file.relative_to(folder).as_posix(): _digest_of(file)
        for file in written
        if file.is_file()
    }
    held[_FILES_SEAL] = digest_of_json(held[_FILES])
    with atomic_files.replaced(folder / _METADATA) as new:
        pathlib.Path(new).write_text(json.dumps(held))


@reading()
def check_folder(path):
    """Compares the config and the assets of an unpacked model.

    Also checks what `check_seal` does: Keras hides the error of a weights file
    that cannot be opened. The error names a file that differs.
    """
    folder = pathlib.Path(path)
    weights = folder / "model.weights.h5"
    if weights.exists():
        check_bytes(weights)
        with h5py.File(weights) as file:
            check_seal(file)
    if not (folder / _METADATA).exists():
        return
    held = json.loads((folder / _METADATA).read_bytes())
    files, seal = held.get(_FILES), held.get(_FILES_SEAL)
    if files is None and seal is None:
        return
    differing = [_METADATA]
    if seal == digest_of_json(files):
        differing = [
            name
            for name, digest in files.items()
            if not (folder / name).is_file()
            or digest != _digest_of(folder / name)
        ]
    if differing:
        raise UnreadableFileError(
            f"The bytes of '{folder / differing[0]}' are not those that were "
            f"saved: their SHA-256 differs. Received: {differing}"
        )


def digest_of_json(value):
    """Returns the SHA-256 of a value that JSON supports, as a string."""
    text = json.dumps(value, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _digest_of(path):
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _check_blocks(name, dataset, blocks):
    if _digest_of_blocks(dataset, blocks) != dataset.attrs[DIGEST]:
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


def _digest_of_blocks(dataset, blocks):
    """Returns the SHA-256 of dtype, shape and value of a dataset."""
    head = (dataset.dtype.str, dataset.attrs.get("dtype"), dataset.shape)
    digest = hashlib.sha256(repr(head).encode())
    for block in blocks:
        digest.update(_bytes(block))
    return digest.hexdigest()


def _blocks(dataset, block_bytes=_BLOCK_BYTES):
    """Yields the value of a dataset in blocks of rows."""
    if not dataset.shape or not dataset.size:
        yield dataset[()]
        return
    row_bytes = dataset.size // len(dataset) * dataset.dtype.itemsize
    step = max(1, block_bytes // row_bytes)
    for start in range(0, len(dataset), step):
        yield dataset[start : start + step]


def _bytes(value):
    value = np.asarray(value)
    if value.dtype.kind in "OU":
        # Strings are read back as bytes, so both have the same digest.
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
