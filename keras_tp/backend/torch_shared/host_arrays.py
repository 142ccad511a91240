"""Tensors as numpy arrays in the host's memory, and the other way round."""

import ml_dtypes
import numpy as np
import torch

# numpy reads these as integers of the same size.
_AS_INTEGERS = {
    torch.bfloat16: (torch.int16, ml_dtypes.bfloat16),
    torch.float8_e4m3fn: (torch.uint8, ml_dtypes.float8_e4m3fn),
    torch.float8_e5m2: (torch.uint8, ml_dtypes.float8_e5m2),
}


def to_numpy(tensor):
    """Returns a tensor of any device as an array."""
    tensor = tensor.cpu()
    if tensor.dtype in _AS_INTEGERS:
        integers, dtype = _AS_INTEGERS[tensor.dtype]
        return tensor.view(integers).numpy().view(dtype)
    return tensor.numpy()


def to_tensor(array, dtype):
    """Returns an array as a tensor in the host's memory.

    Args:
        array: Array, of the numpy dtype that `to_numpy` gives for `dtype`.
        dtype: `torch.dtype`.
    """
    array = np.ascontiguousarray(array)
    if dtype in _AS_INTEGERS:
        integers, _ = _AS_INTEGERS[dtype]
        array = array.view(f"{integers}".removeprefix("torch."))
        return torch.from_numpy(array).view(dtype)
    return torch.from_numpy(array)
