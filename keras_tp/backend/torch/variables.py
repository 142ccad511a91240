"""Sets the values of variables to shards."""

import functools
import weakref

import torch
from keras.src.backend.common import is_float_dtype
from torch.distributed.tensor import DTensor

from keras_tp.backend.torch import placement


def lay_out(variable, value):
    """Sets the value of a variable, split by its layout.

    Args:
        variable: A Keras variable with a layout.
        value: Plain tensor or DTensor of the whole variable.
    """
    placed = placement.as_placement(variable._layout)
    if stays_plain(variable, placed):
        value = placement.to_full(value.detach())
    elif isinstance(value, DTensor) and value.device_mesh == placed.mesh:
        value = value.detach().redistribute(placed.mesh, placed.placements)
        _keep_own_part(value)
    else:
        # A DTensor cannot be redistributed to another mesh.
        value = placement.to_full(value.detach())
        value = placement.from_full(value, placed)
    set_value(variable, value)


def _keep_own_part(tensor):
    """Copies the local shard of a DTensor if it is a view of a larger tensor.

    After a move from one split dim to another without an all-to-all, the shard
    is a view of the whole tensor, which would stay in memory.
    """
    local = tensor._local_tensor
    if local.untyped_storage().nbytes() > local.nbytes:
        tensor._local_tensor = local.clone(
            memory_format=torch.contiguous_format
        )


def set_value(variable, value):
    """Sets the value of a variable, as a `torch.nn.Parameter`."""
    parameter = torch.nn.Parameter(value, requires_grad=variable.trainable)
    if isinstance(parameter, DTensor) and parameter.requires_grad:
        # Data parallelism all-reduces a gradient here, and only here.
        parameter.register_hook(
            functools.partial(
                _redistributed,
                variable=weakref.ref(variable),
                mesh=parameter.device_mesh,
                placements=parameter.placements,
            )
        )
    variable._value = parameter


def stays_plain(variable, placed):
    """Returns whether a variable is a plain tensor in every process.

    Counters and random state are plain: they are not split, they have no
    gradient, and Python reads them.
    """
    if placed.mesh is None:
        return True
    if variable.trainable or placed.is_split:
        return False
    return len(variable._shape) == 0 or not is_float_dtype(variable._dtype)


def _redistributed(gradient, variable, mesh, placements):
    # If the slots are split further, a reduce-scatter gives each process only
    # its slots' part of the gradient.
    slots = getattr(variable(), "_slot_layout", None)
    if slots is not None:
        placements = placement.as_placement(slots).placements
    if not isinstance(gradient, DTensor):
        return placement.from_full(
            gradient, placement.Placement(mesh, placements)
        )
    if gradient.placements == placements:
        return gradient
    return gradient.redistribute(mesh, placements)
