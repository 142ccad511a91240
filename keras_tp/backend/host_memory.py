"""Arrays in the memory of the host."""

import ctypes
import math
import mmap
import sys

import numpy as np

_LARGE_BYTES = 2**20


def zeros(shape, dtype):
    """Returns an array. The system takes a large one back when it is freed.

    The C library would keep arrays of many megabytes for itself. The zeros of a
    large array take memory only where they are written.

    Args:
        shape: Tuple or list of ints.
        dtype: `numpy.dtype`.
    """
    count = math.prod(shape)
    if count * dtype.itemsize < _LARGE_BYTES:
        return np.zeros(shape, dtype)
    pages = mmap.mmap(-1, count * dtype.itemsize)
    return np.frombuffer(pages, dtype, count).reshape(shape)


def give_back():
    """Makes the C library return freed memory to the system.

    It keeps some for each thread, and the frameworks have many.
    """
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)
