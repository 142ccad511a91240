"""Large arrays that stay in their file until a process reads its part."""

import mmap

import ml_dtypes
import numpy as np

# Smaller arrays are read whole: they cost less than a mapping.
_LARGE_BYTES = 2**20
_BLOCK_BYTES = 2**22
_FLOATS = ("float16", "bfloat16", "float32", "float64")


class StoredArray(np.memmap):
    """An array in a file, read-only, for values that are loaded.

    A view of it, such as a transposed one, is in the file, too.
    """


def of_file(file, offset, dtype, shape):
    """Returns the array at an offset of a file, in bytes.

    Args:
        file: String, path, or a file that is open for reading.
    """
    return StoredArray(file, dtype, "r", offset, tuple(shape))


def of_dataset(dataset, part=None):
    """Returns the array of an `h5py.Dataset` that was checked, in its file.

    `None` if it is small, or not in one piece in a file.

    Args:
        dataset: `h5py.Dataset`.
        part: `archives.Part` that is the HDF5 file. Defaults to `None`, for a
            file of its own.
    """
    dtype, offset = dataset.dtype, dataset.id.get_offset()
    if dataset.attrs.get("dtype") == "bfloat16":
        dtype = np.dtype(ml_dtypes.bfloat16)
    file = dataset.file
    is_plain = dtype.isnative and (
        dtype.kind in "biuf" or dtype == ml_dtypes.bfloat16
    )
    if (
        offset is None
        or not is_plain
        or not is_large(dataset)
        or (file.driver == "fileobj" and part is None)
        or file.userblock_size
    ):
        return None
    path, start = (
        (file.filename, 0) if part is None else (part.path, part.start)
    )
    return of_file(path, start + offset, dtype, dataset.shape)


def is_stored(value):
    """Returns whether an array is in a file, and not a copy in memory."""
    return isinstance(value, StoredArray) and value._mmap is not None


def is_large(value):
    """Returns whether an array or a dataset is worth a mapping."""
    return value.nbytes >= max(_LARGE_BYTES, 1)


def can_become(value, dtype):
    """Returns whether parts of an array can be converted one by one."""
    return value.dtype.name == dtype or {value.dtype.name, dtype} <= {*_FLOATS}


def copy_to(target, value, positions=()):
    """Copies a part of a stored array into an array in memory.

    The mapped file counts as memory of this process for one block at a time.

    Args:
        target: Array of the part's shape, of any dtype.
        value: `StoredArray`.
        positions: Tuple with a slice for each dim. Defaults to all of it.
    """
    for source, block in _pairs(value[(*positions, ...)], target):
        block[...] = source
        _forget(value)


def read(value):
    """Returns a stored array in memory."""
    found = np.empty(value.shape, value.dtype)
    copy_to(found, value)
    return found


def blocks(value):
    """Yields a stored array in blocks, in memory, in the order of the file."""
    for block, _ in _pairs(value, value):
        yield np.array(block)
        _forget(value)


def _pairs(source, target):
    """Yields blocks of two arrays of one shape, by the first one's strides."""
    lengths = [
        abs(stride) if size > 1 else 0
        for size, stride in zip(source.shape, source.strides)
    ]
    dim = int(np.argmax(lengths)) if any(lengths) else 0
    step = max(1, _BLOCK_BYTES // max(1, *lengths)) if lengths else 1
    if not any(lengths) or step >= source.shape[dim]:
        yield source, target
        return
    for start in range(0, source.shape[dim], step):
        at = (*[slice(None)] * dim, slice(start, start + step))
        yield from _pairs(source[at], target[at])


def _forget(value):
    """Gives the mapped pages back. The next access reads them again."""
    if hasattr(mmap, "MADV_DONTNEED"):
        value._mmap.madvise(mmap.MADV_DONTNEED)
