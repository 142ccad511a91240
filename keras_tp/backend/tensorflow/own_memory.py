"""Tensors in memory that the C library frees.

TensorFlow keeps the memory of its own tensors, and it frees that of a numpy
array in a thread which waits for Python's global lock. Reading a DTensor holds
this lock while it waits for the thread: both would wait for ever.
"""

import ctypes
import functools
import math
import os

import numpy as np
import tensorflow as tf

_LARGE_BYTES = 2**20
_ALIGNMENT = 64
_CPU = 1
# Codes of DLPack for kinds of numpy's dtypes, and for bfloat16.
_CODES = {"i": 0, "u": 1, "f": 2}
_BFLOAT16 = 4


# https://dmlc.github.io/dlpack/latest/c_api.html
class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("byte_offset", ctypes.c_uint64),
        ("manager", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    )


@functools.cache
def _library():
    library = ctypes.CDLL(None)
    library.calloc.restype = ctypes.c_void_p
    library.calloc.argtypes = (ctypes.c_size_t, ctypes.c_size_t)
    return library


@functools.cache
def _new_capsule():
    new = ctypes.pythonapi.PyCapsule_New
    new.restype = ctypes.py_object
    new.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
    return new


@functools.cache
def _pointer_of():
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype = ctypes.c_void_p
    pointer.argtypes = (ctypes.py_object, ctypes.c_char_p)
    return pointer


def tensor_of(value):
    """Returns a tensor with the value of an array.

    A large one gets memory of its own.
    """
    if not is_large(value.shape, value.dtype):
        return tf.constant(value)
    tensor, memory = _new(value.shape, value.dtype)
    memory[...] = value
    return tensor


def zeros(shape, dtype):
    """Returns a tensor of zeros. Large ones take memory when they are written.

    Args:
        shape: List or tuple of ints.
        dtype: `numpy.dtype`.
    """
    if not is_large(shape, dtype):
        return tf.zeros(shape, dtype)
    return _new(shape, dtype)[0]


def addresses(tensors):
    """Returns where the values of tensors lie, as ints."""
    found = []
    for tensor in tensors:
        capsule = tf.experimental.dlpack.to_dlpack(tensor)
        block = _pointer_of()(capsule, b"dltensor")
        found.append(_Tensor.from_address(block).data)
    return found


def is_large(shape, dtype):
    """Returns whether a tensor gets memory of its own."""
    is_known = dtype.kind in _CODES or dtype.name == "bfloat16"
    size = math.prod(shape) * dtype.itemsize
    return os.name == "posix" and is_known and size >= _LARGE_BYTES


def _new(shape, dtype):
    """Returns a tensor of zeros, and an array that writes into its memory."""
    # One block holds DLPack's structure, the shape and the values, so that the
    # C library's `free` is all that it takes to delete the tensor.
    head = ctypes.sizeof(_Tensor)
    size = math.prod(shape) * dtype.itemsize
    block = _library().calloc(1, head + 8 * len(shape) + _ALIGNMENT + size)
    if not block:
        raise MemoryError(f"The host has no {size} bytes for a tensor.")
    shape_at = block + head
    data = -(-(shape_at + 8 * len(shape)) // _ALIGNMENT) * _ALIGNMENT
    (ctypes.c_int64 * len(shape)).from_address(shape_at)[:] = shape
    tensor = _Tensor.from_address(block)
    tensor.data, tensor.shape = data, shape_at
    tensor.device_type, tensor.ndim, tensor.lanes = _CPU, len(shape), 1
    tensor.code = _CODES.get(dtype.kind, _BFLOAT16)
    tensor.bits = 8 * dtype.itemsize
    tensor.deleter = ctypes.cast(_library().free, ctypes.c_void_p)
    bytes_of = (ctypes.c_uint8 * size).from_address(data)
    memory = np.frombuffer(bytes_of, dtype).reshape(shape)
    capsule = _new_capsule()(block, b"dltensor", None)
    return tf.experimental.dlpack.from_dlpack(capsule), memory
