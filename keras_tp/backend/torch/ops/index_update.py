"""Writes into split tensors, as `x[index] = value` does."""

import functools

import torch
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from keras_tp.backend.torch import local_tensors
from keras_tp.backend.torch import placement


def hook_setitem(original):
    """Writes into a split tensor, which stays split.

    The tensor is gathered and written into, and each process keeps its shard.
    DTensor writes into a view, which is a copy if the dim is split, so the
    write is lost.
    """

    @functools.wraps(original)
    def __setitem__(self, index, value):
        if not placement.needs_communication(self):
            return original(self, index, value)
        index, value = pytree.tree_map_only(
            DTensor, placement.to_full, (index, value)
        )
        whole = placement.to_full(self).clone()
        original(whole, index, value)
        mesh = self.device_mesh
        written = placement.replicate(whole, mesh)
        if all(p.is_shard() or p.is_replicate() for p in self.placements):
            written = written.redistribute(placements=self.placements)
        self.copy_(written)

    return __setitem__


def check_written(op, tensor):
    """Raises if a tensor is a view that does not share its base's memory.

    Args:
        op: ATen operation that writes into `tensor`.
        tensor: DTensor.
    """
    base = tensor._base if tensor._is_view() else None
    if base is None or not isinstance(base, DTensor):
        return
    local, viewed = tensor._local_tensor, base._local_tensor
    if local.untyped_storage().data_ptr() == (
        viewed.untyped_storage().data_ptr()
    ):
        return
    raise NotImplementedError(
        f"{op} would write into a copy: the view is of a dim that is split "
        "over devices. Write with `x[index] = value` or "
        "`keras.ops.slice_update`. Received: view of shape="
        f"{tuple(tensor.shape)} of a tensor of shape={tuple(base.shape)}, "
        f"placements={base.placements}"
    )


def fill(op, args, kwargs):
    """Fills this process's shard with one number."""
    target, value = args
    value = placement.to_full(value)
    if not isinstance(target, DTensor):
        return op(target, value)
    check_written(op, target)
    if any(p.is_partial() for p in target.placements):
        settled = placement.settled(target)
        target._local_tensor = settled._local_tensor
        target._spec = settled._spec
    op(target._local_tensor, value)
    return target


def strided_view(op, args, kwargs):
    """Runs `as_strided`, whose strides are valid for a replicated tensor only.

    The gradient of a write into a slice of a plain tensor calls it.
    """
    x, *rest = args
    if placement.needs_communication(x):
        raise NotImplementedError(
            "A tensor that is split over devices cannot be viewed by its "
            "strides. Write into a plain tensor, or use "
            "`keras.ops.slice_update`. Received: "
            f"shape={tuple(x.shape)}, placements={x.placements}"
        )
    view = op(x._local_tensor, *rest, **kwargs)
    return local_tensors.wrap_parts(view, x.device_mesh, x.placements)


FILLS = (torch.ops.aten.fill_.Scalar, torch.ops.aten.fill_.Tensor)
