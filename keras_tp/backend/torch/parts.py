"""Parts of variables, read and set in the host's memory for checkpoints."""

import ml_dtypes
import numpy as np
import torch
from torch.distributed.tensor import DTensor

from keras_tp.backend.torch import placement
from keras_tp.backend.torch import processes

# numpy reads these as integers of the same size.
_AS_INTEGERS = {
    torch.bfloat16: (torch.int16, ml_dtypes.bfloat16),
    torch.float8_e4m3fn: (torch.uint8, ml_dtypes.float8_e4m3fn),
    torch.float8_e5m2: (torch.uint8, ml_dtypes.float8_e5m2),
}


def held(variable):
    """Returns this process's part; see `distribution_lib.variable_parts`."""
    value = variable._value.detach()
    if not isinstance(value, DTensor):
        whole = tuple([(0, size)] for size in value.shape)
        return [(whole, processes.is_first(), lambda: _to_numpy(value))]
    mesh, placements = value.device_mesh, value.placements
    is_written = not any(
        mesh.get_local_rank(i)
        for i, placed in enumerate(placements)
        if not placement.is_shard(placed)
    )
    ranges = placement.ranges(value.shape, mesh, placements)
    return [(ranges, is_written, lambda: _to_numpy(value.to_local()))]


@torch.no_grad()
def assign(variable, part_of):
    """Sets the value of a variable; see `distribution_lib.assign_parts`."""
    ((ranges, *_),) = held(variable)
    value = variable._value.detach()
    local = value.to_local() if isinstance(value, DTensor) else value
    part = np.ascontiguousarray(part_of(ranges)).reshape(local.shape)
    if local.dtype in _AS_INTEGERS:
        integers, _ = _AS_INTEGERS[local.dtype]
        part = part.view(f"{integers}".removeprefix("torch."))
        local = local.view(integers)
    local.copy_(torch.from_numpy(part))


def _to_numpy(tensor):
    tensor = tensor.cpu()
    if tensor.dtype in _AS_INTEGERS:
        integers, dtype = _AS_INTEGERS[tensor.dtype]
        return tensor.view(integers).numpy().view(dtype)
    return tensor.numpy()
