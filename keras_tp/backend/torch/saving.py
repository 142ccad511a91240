"""All processes gather what is saved, and one of them writes."""

import functools
import os
import tempfile

from keras.src.backend.torch import core
from torch.distributed.tensor import DTensor

from keras_tp.backend.torch import processes


def save_once(original):
    """All processes gather, one of them writes."""

    @functools.wraps(original)
    def save(model, filepath, *args, **kwargs):
        if not _is_distributed(model) or not isinstance(
            filepath, (str, os.PathLike)
        ):
            return original(model, filepath, *args, **kwargs)
        processes.meet("Saving")
        if processes.is_first():
            result = original(model, filepath, *args, **kwargs)
        else:
            result = _join_save(original, model, filepath, *args, **kwargs)
        # Whoever loads the file next finds it complete.
        processes.meet("Saving")
        return result

    return save


def by_file(original):
    """Wraps `saving_lib.is_memory_sufficient`: not for a whole model.

    Keras otherwise reads a `.keras` file as a whole, or makes it in memory.
    """

    @functools.wraps(original)
    def is_memory_sufficient(model):
        return not _is_distributed(model) and original(model)

    return is_memory_sufficient


def _is_distributed(model):
    return any(
        isinstance(variable._value, DTensor) for variable in model.variables
    )


def _join_save(original, model, filepath, *args, **kwargs):
    """Takes part in the gathering and leaves an empty file, then nothing."""
    _joining.append(True)
    try:
        with tempfile.TemporaryDirectory() as folder:
            name = os.path.basename(os.fspath(filepath))
            original(model, os.path.join(folder, name), *args, **kwargs)
    finally:
        _joining.pop()


_joining = []


def store_once(original):
    """Wraps `H5IOStore.__setitem__`: who does not write, only gathers."""

    @functools.wraps(original)
    def __setitem__(self, key, value):
        if _joining:
            core.convert_to_numpy(value)
            return
        original(self, key, value)

    return __setitem__
