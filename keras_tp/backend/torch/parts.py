"""Parts of variables, read and set in the host's memory for checkpoints."""

import torch
from torch.distributed.tensor import DTensor

from keras_tp.backend.torch import placement
from keras_tp.backend.torch import processes
from keras_tp.backend.torch_shared import host_arrays


def held(variable):
    """Returns this process's part; see `distribution_lib.variable_parts`."""
    value = variable._value.detach()
    if not isinstance(value, DTensor):
        whole = tuple([(0, size)] for size in value.shape)
        return [
            (whole, processes.is_first(), lambda: host_arrays.to_numpy(value))
        ]
    mesh, placements = value.device_mesh, value.placements
    is_written = not any(
        mesh.get_local_rank(i)
        for i, placed in enumerate(placements)
        if not placement.is_shard(placed)
    )
    ranges = placement.ranges(value.shape, mesh, placements)
    return [
        (ranges, is_written, lambda: host_arrays.to_numpy(value.to_local()))
    ]


@torch.no_grad()
def assign(variable, part_of):
    """Sets the value of a variable; see `distribution_lib.assign_parts`."""
    ((ranges, *_),) = held(variable)
    value = variable._value.detach()
    local = value.to_local() if isinstance(value, DTensor) else value
    part = host_arrays.to_tensor(part_of(ranges), local.dtype)
    local.copy_(part.reshape(local.shape))
