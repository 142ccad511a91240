"""A DTensor that Python reads: as a number, as arrays, lists or text.

What is read is the whole, alike in every process: a Python branch that
differed between them would end, or change, the run. Where parts are in other
processes it is a collective, which all of them have to call.
"""

import functools

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from keras_tp.backend.torch import placement
from keras_tp.backend.torch import processes


def whole(tensor, what):
    """Returns all of a tensor as a plain one, without a gradient.

    Args:
        tensor: DTensor or plain tensor.
        what: String that names what reads it, for the error that a process
            gives where the others do not come.
    """
    if placement.needs_communication(tensor):
        processes.meet(what)
    return placement.to_full(tensor.detach())


def number(op, args, kwargs):
    """Handler of `item()`, `float()`, `int()`, `bool()` and `if`.

    DTensor's own way is the value of this process alone.
    """
    (tensor,) = args
    return op(whole(tensor, "Reading a number from a split tensor"))


def hook_array(original):
    """Arrays of numpy are whole: `get_weights` and saving."""

    @functools.wraps(original)
    def __array__(self, dtype=None, copy=None):
        what = "Converting a tensor to numpy, as saving does,"
        return np.array(whole(self, what).numpy(), dtype=dtype)

    return __array__


def hook_numpy(original):
    """`numpy()` of a tensor is whole."""

    @functools.wraps(original)
    def numpy(self, *args, **kwargs):
        if isinstance(self, DTensor):
            if self.requires_grad and not kwargs.get("force"):
                # The error of torch.
                return original(torch.empty((), requires_grad=True))
            self = whole(self, "`numpy()`")
        return original(self, *args, **kwargs)

    return numpy


def hook_tolist(original):
    """`tolist()` is whole; torch has none for a DTensor."""

    @functools.wraps(original)
    def tolist(self):
        return whole(self, "`tolist()`").tolist()

    return tolist


def hook_format(original):
    """A number in a text, such as `f"{loss:.3f}"`."""

    @functools.wraps(original)
    def __format__(self, spec):
        if self.ndim == 0 and spec:
            return format(self.item(), spec)
        return original(self, spec)

    return __format__


def hook_repr(original):
    """The text of a split tensor has no values: a process has a part of them.

    It is no collective, as debuggers and error messages ask for it.
    """

    @functools.wraps(original)
    def __repr__(self):
        if not placement.needs_communication(self):
            return original(self)
        axes = zip(self.device_mesh.mesh_dim_names or (), self.placements)
        placed = ", ".join(f"{name}={place}" for name, place in axes)
        return (
            f"DTensor(shape={tuple(self.shape)}, dtype={self.dtype}, split: "
            f"{placed or self.placements}; "
            "`keras.ops.convert_to_numpy` reads its values)"
        )

    return __repr__
