"""Reads of a DTensor from Python: as a number, an array, a list or text.

A read gives the whole tensor, the same in every process, because a Python
branch that differs between processes would stop or change the run. If the
tensor is split, a read is a collective that every process has to call.
"""

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from keras_tp.backend.torch import placement
from keras_tp.backend.torch import processes


def whole(tensor, what):
    """Returns the whole tensor as a plain one, without a gradient.

    Args:
        tensor: DTensor or plain tensor.
        what: String that names the read, for the error that is raised if
            other processes do not call it.
    """
    if placement.needs_communication(tensor):
        processes.meet(what)
    return placement.to_full(tensor.detach())


def number(op, args, kwargs):
    """Handler of `item()`, `float()`, `int()`, `bool()` and `if`.

    DTensor itself returns the value of this process's shard.
    """
    (tensor,) = args
    return op(whole(tensor, "Reading a number from a split tensor"))


class Reads:
    """Methods of DTensor by which Python reads a tensor."""

    def __array__(original, self, dtype=None, copy=None):
        """Makes numpy arrays whole, for `get_weights` and saving."""
        what = "Converting a tensor to numpy, as saving does,"
        return np.array(whole(self, what).numpy(), dtype=dtype)

    def numpy(original, self, *args, **kwargs):
        """Returns the whole tensor as an array."""
        if isinstance(self, DTensor):
            if self.requires_grad and not kwargs.get("force"):
                # Raises torch's own error.
                return original(torch.empty((), requires_grad=True))
            self = whole(self, "`numpy()`")
        return original(self, *args, **kwargs)

    def tolist(original, self):
        """Returns the whole tensor as a list; torch lacks it for DTensor."""
        return whole(self, "`tolist()`").tolist()

    def __format__(original, self, spec):
        """Formats a scalar with a format spec, such as `f"{loss:.3f}"`."""
        if self.ndim == 0 and spec:
            return format(self.item(), spec)
        return original(self, spec)

    def __repr__(original, self):
        """Describes a split tensor without its values.

        Not a collective: debuggers and errors call it in one process.
        """
        if not placement.needs_communication(self):
            return original(self)
        axes = zip(self.device_mesh.mesh_dim_names or (), self.placements)
        placed = ", ".join(f"{name}={place}" for name, place in axes)
        return (
            f"DTensor(shape={tuple(self.shape)}, dtype={self.dtype}, split: "
            f"{placed or self.placements}; "
            "`keras.ops.convert_to_numpy` reads its values)"
        )
