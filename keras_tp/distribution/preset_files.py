"""Presets of KerasHub in Hugging Face's layout, read part by part."""

import contextlib
import os

import numpy as np
from keras.src.distribution.distribution_lib import distribution

from keras_tp.backend.saving import stored_arrays
from keras_tp.backend.saving import tensor_files


class _File(contextlib.nullcontext):
    """What KerasHub uses of `safetensors.safe_open`.

    A large tensor is a `StoredArray`. KerasHub transposes and reshapes it, and
    each process reads the parts of the result that its devices hold.
    """

    def __init__(self, path):
        super().__init__(self)
        # Hugging Face's cache has links.
        self._path = path
        self._file = tensor_files.TensorFile(os.path.realpath(path))

    def keys(self):
        return self._file.tensors.keys()

    def get_tensor(self, name):
        if name not in self._file.tensors:
            raise ValueError(f"There is no tensor {name!r} in '{self._path}'.")
        value = self._file.array(name)
        return value if stored_arrays.is_large(value) else np.array(value)


class _Safetensors:
    """The module `safetensors`, for KerasHub."""

    def __init__(self, original):
        self._original = original

    def __getattr__(self, name):
        return getattr(self._original, name)

    def safe_open(self, path, *args, **kwargs):
        if distribution() is None:
            return self._original.safe_open(path, *args, **kwargs)
        return _File(path)


def read_in_parts(original):
    """Replaces the module `safetensors` in a module of KerasHub.

    Args:
        original: The module, or `None` if it is not installed.
    """
    return original and _Safetensors(original)
