"""Writes into split tensors, as `x[index] = value` and `slice_update` do."""

import functools

import torch
from keras.src import tree
from keras.src.backend.torch import core
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Replicate
from torch.distributed.tensor import Shard
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
        written = placement.replicate(whole, self.device_mesh)
        if all(p.is_shard() or p.is_replicate() for p in self.placements):
            written = written.redistribute(placements=self.placements)
        self.copy_(written)

    return __setitem__


def hook_slice_update(original):
    """Wraps `slice_update`, which writes into caches of keys and values.

    A dim that is written in full, such as the heads, stays split as in the
    updates or the inputs. DTensor would gather both.
    """

    @functools.wraps(original)
    def slice_update(inputs, start_indices, updates):
        inputs = core.convert_to_tensor(inputs)
        updates = core.convert_to_tensor(updates)
        if not isinstance(inputs, DTensor) and not isinstance(updates, DTensor):
            return original(inputs, start_indices, updates)
        mesh = local_tensors.mesh_of((updates, inputs), {})
        placements = [
            _common(a, b, inputs.shape, updates.shape)
            for a, b in zip(
                local_tensors.placements_of(updates, mesh),
                local_tensors.placements_of(inputs, mesh),
            )
        ]
        local = original(
            _part(inputs, mesh, placements),
            tree.map_structure(placement.to_full, start_indices),
            _part(updates, mesh, placements),
        )
        return DTensor.from_local(
            local,
            mesh,
            placements,
            run_check=False,
            shape=inputs.shape,
            stride=inputs.contiguous().stride(),
        )

    return slice_update


def _common(of_updates, of_inputs, shape, written):
    """Returns a placement in which each process writes into its own shard."""
    for placed in (of_updates, of_inputs):
        if placed.is_shard() and shape[placed.dim] == written[placed.dim]:
            return placed
    return Replicate()


def _part(tensor, mesh, placements):
    if not isinstance(tensor, DTensor):
        tensor = placement.replicate(tensor, mesh)
    return tensor.redistribute(placements=placements).to_local()


def written_to(op, tensor):
    """Prepares a DTensor that an operation writes into: no partial sums.

    Raises:
        NotImplementedError: if it is a view that does not share its base's
            memory, so that the write would be lost.
    """
    base = tensor._base if tensor._is_view() else None
    if isinstance(base, DTensor):
        local, viewed = tensor._local_tensor, base._local_tensor
        if local.untyped_storage().data_ptr() != (
            viewed.untyped_storage().data_ptr()
        ):
            raise NotImplementedError(
                f"{op} would write into a copy, because the dim of the view is "
                "split over devices. Write with `x[index] = value` or "
                "`keras.ops.slice_update`. Received: view of "
                f"shape={tuple(tensor.shape)} of a tensor of "
                f"shape={tuple(base.shape)}, placements={base.placements}"
            )
    settled = placement.settled(tensor)
    tensor._local_tensor, tensor._spec = settled._local_tensor, settled._spec


def fill(op, args, kwargs):
    """Fills this process's shard with one number."""
    target, value = args
    value = placement.to_full(value)
    if not isinstance(target, DTensor):
        return op(target, value)
    written_to(op, target)
    op(target._local_tensor, value)
    return target


def along_index(op, args, kwargs):
    """Writes into a tensor along an index, as the gradient of `take` does.

    The operation that returns a new tensor is run. DTensor, in place, gives the
    target the layout of the result, but leaves the target's shards as they are.
    """
    target, *rest = args
    if not isinstance(target, DTensor):
        rest, kwargs = pytree.tree_map_only(
            DTensor, placement.to_full, (rest, kwargs)
        )
        return op(target, *rest, **kwargs)
    written_to(op, target)
    name = op._schema.name.removeprefix("aten::").removesuffix("_")
    overload = op._schema.overload_name or "default"
    result = getattr(getattr(torch.ops.aten, name), overload)(
        target, *rest, **kwargs
    )
    result = result.redistribute(placements=target.placements)
    target._local_tensor.copy_(result._local_tensor)
    return target


def new_zeros(op, args, kwargs):
    """Returns zeros that are split along the dims that `x` is split along.

    Such zeros collect gradients. DTensor replicates them if one size differs,
    and the gradient is gathered then.
    """
    x, size = args
    placements = [
        placed
        if type(placed) is Shard
        and placed.dim < len(size)
        and size[placed.dim] == x.shape[placed.dim]
        else Replicate()
        for placed in x.placements
    ]
    held = list(size)
    for placed in placements:
        if placed.is_shard():
            held[placed.dim] = x._local_tensor.shape[placed.dim]
    local = op(x._local_tensor, held, **kwargs)
    return local_tensors.wrap_parts(local, x.device_mesh, placements, size)


def strided_view(op, args, kwargs):
    """Runs `as_strided`, whose strides are valid for a replicated tensor only.

    The gradient of a write into a slice of a plain tensor calls it, and writes
    into the view: its tensor is gathered then, in place.
    """
    x, *rest = args
    if placement.needs_communication(x):
        node = torch._C._current_autograd_node()
        if node is None or node.name() != "torch::autograd::CopySlices":
            raise NotImplementedError(
                "A tensor that is split over devices cannot be viewed by its "
                "strides. Write into a plain tensor, or use "
                "`keras.ops.slice_update`. Received: "
                f"shape={tuple(x.shape)}, placements={x.placements}"
            )
        local = x._local_tensor.new_empty_strided(x.shape, x.stride())
        local.copy_(placement.to_full(x))
        whole = local_tensors.wrap_parts(
            local, x.device_mesh, [Replicate()] * x.device_mesh.ndim
        )
        x._local_tensor, x._spec = whole._local_tensor, whole._spec
    view = op(x._local_tensor, *rest, **kwargs)
    return local_tensors.wrap_parts(view, x.device_mesh, x.placements)
