"""Reads and writes safetensors files part by part, in little memory.

The library `safetensors` takes all tensors of a file at once, as bytes, and
maps whole files into memory. Here a file is written tensor by tensor, and read
in blocks. The library checks the structure of a file before it is read.
Format: https://huggingface.co/docs/safetensors
"""

import hashlib
import json
import math
import os
import weakref

import ml_dtypes
import numpy as np
import safetensors

from keras_tp.backend.saving import digests
from keras_tp.backend.saving import stored_arrays

_DTYPES = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E5M2": ml_dtypes.float8_e5m2,
    "I64": np.int64,
    "I32": np.int32,
    "I16": np.int16,
    "I8": np.int8,
    "U64": np.uint64,
    "U32": np.uint32,
    "U16": np.uint16,
    "U8": np.uint8,
    "BOOL": np.bool_,
}
_NAMES = {np.dtype(dtype).name: name for name, dtype in _DTYPES.items()}
_LENGTH_BYTES = 8
_BLOCK_BYTES = 2**22


def can_hold(dtype):
    """Returns whether safetensors has a dtype, given by its name."""
    return dtype in _NAMES


def numpy_dtype(dtype):
    """Returns numpy's dtype of a name, such as `"bfloat16"`."""
    return np.dtype(_DTYPES[_NAMES[dtype]])


def write(path, entries):
    """Writes a file, and waits until it is on the disk.

    Args:
        path: String or path of the file.
        entries: List with, for each tensor: its name, its shape, the name of
            its dtype, and a function that returns its array.

    Returns:
        Dict from a tensor's name to the SHA-256 of its bytes.
    """
    header, end = {}, 0
    for name, shape, dtype, _ in entries:
        start, count = end, math.prod(shape)
        end = start + count * numpy_dtype(dtype).itemsize
        header[name] = {
            "dtype": _NAMES[dtype],
            "shape": list(shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header).encode()
    # The library aligns values to 8 bytes, too.
    text += b" " * (-len(text) % 8)
    found = {}
    with open(path, "xb") as file:
        file.write(len(text).to_bytes(_LENGTH_BYTES, "little"))
        file.write(text)
        for name, shape, dtype, read in entries:
            array = np.ascontiguousarray(read()).reshape(shape)
            if array.dtype.name != dtype:
                raise ValueError(
                    f"The array of {name!r} must have the dtype {dtype!r}. "
                    f"Received: {array.dtype.name!r}"
                )
            data = array.reshape(-1).view(np.uint8)
            found[name] = hashlib.sha256(data).hexdigest()
            file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return found


class TensorFile:
    """A safetensors file that is open for reading.

    Args:
        path: Path of the file.
        is_held: Boolean. Whether the file stays open, so that it can be read
            after its name was removed. Defaults to `False`.

    Attributes:
        tensors: Dict from a tensor's name to its shape and its dtype's name.

    Raises:
        UnreadableFileError: if it is not a valid file: cut, with parts that
            overlap, or with sizes that do not fit.
    """

    def __init__(self, path, is_held=False):
        self._path, self._descriptor = path, None
        with digests.reading():
            if os.path.islink(path) or not os.path.isfile(path):
                raise ValueError(f"There is no file '{path}'.")
            if is_held:
                self._descriptor = os.open(path, os.O_RDONLY)
                weakref.finalize(self, os.close, self._descriptor)
            try:
                with safetensors.safe_open(path, "numpy"):
                    pass
            except safetensors.SafetensorError as e:
                raise ValueError(f"'{path}': {e}") from e
            with self._opened() as file:
                length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
                header = json.loads(file.read(length))
            header.pop("__metadata__", None)
            self._start = _LENGTH_BYTES + length
            self._offsets, self.tensors = {}, {}
            for name, held in header.items():
                if held["dtype"] not in _DTYPES:
                    raise ValueError(
                        f"Numpy has no dtype {held['dtype']!r}, as {name!r} "
                        f"has it in '{path}'."
                    )
                dtype = np.dtype(_DTYPES[held["dtype"]])
                self.tensors[name] = tuple(held["shape"]), dtype.name
                self._offsets[name] = held["data_offsets"]

    def _opened(self):
        if self._descriptor is None:
            return open(self._path, "rb", buffering=0)
        file = open(self._descriptor, "rb", buffering=0, closefd=False)
        file.seek(0)
        return file

    def digest(self, name):
        """Returns the SHA-256 of a tensor's bytes."""
        start, end = self._offsets[name]
        digest, buffer = hashlib.sha256(), bytearray(_BLOCK_BYTES)
        view = memoryview(buffer)
        with self._opened() as file:
            file.seek(self._start + start)
            while start < end:
                count = file.readinto(view[: min(end - start, _BLOCK_BYTES)])
                if not count:
                    break
                digest.update(view[:count])
                start += count
        return digest.hexdigest()

    def array(self, name):
        """Returns a tensor as a `StoredArray`, or an empty array."""
        shape, dtype = self.tensors[name]
        if not math.prod(shape):
            return np.empty(shape, numpy_dtype(dtype))
        start = self._start + self._offsets[name][0]
        with self._opened() as file:
            return stored_arrays.of_file(file, start, numpy_dtype(dtype), shape)

    def copy_to(self, target, name, positions):
        """Copies a part of a tensor into an array.

        Args:
            target: Array of the part's shape.
            name: String, name of the tensor.
            positions: Tuple with a slice for each dim.
        """
        if target.size:
            stored_arrays.copy_to(target, self.array(name), positions)
