"""Lookups in tables that are split by rows or by columns."""

import functools

import torch
from keras.src.backend.common.name_scope import current_path
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Partial
from torch.distributed.tensor import Replicate
from torch.distributed.tensor import Shard

from keras_tp.backend.torch import fully_sharded
from keras_tp.backend.torch import local_tensors
from keras_tp.backend.torch import placement
from keras_tp.backend.torch import sequence_parallel


def take(original):
    """Wraps `take`: looks up a split vector as a table with one column.

    Quantized embeddings look up scales this way; DTensor would gather them.
    """

    @functools.wraps(original)
    def replacement(x, indices, axis=None):
        value = getattr(x, "_value", x)
        if placement.needs_communication(value) and value.ndim == 1:
            column = value.unsqueeze(-1)
            return original(column, indices, axis=0).squeeze(-1)
        return original(x, indices, axis=axis)

    return replacement


def embedding(original):
    """Wraps `torch.nn.functional.embedding` for split tables."""

    @torch.compiler.allow_in_graph
    def of_dtensors(input, weight):
        return _lookup(original, input, weight)

    @functools.wraps(original)
    def lookup(input, weight, *args, **kwargs):
        if not any(isinstance(t, DTensor) for t in (input, weight)):
            return original(input, weight, *args, **kwargs)
        names = ("padding_idx", "max_norm", "norm_type")
        names += ("scale_grad_by_freq", "sparse")
        given = {**dict(zip(names, args)), **kwargs}
        norm_type = given.pop("norm_type", None)
        if any(value not in (None, False) for value in given.values()):
            raise NotImplementedError(
                "A distributed embedding does not support `padding_idx`, "
                "`max_norm`, `scale_grad_by_freq` or `sparse`. Received: "
                f"norm_type={norm_type}, {given}"
            )
        return of_dtensors(input, weight)

    return lookup


def _lookup(original, ids, table):
    mesh = local_tensors.mesh_of((ids, table), {})
    of_table, of_ids, of_gradient, of_result = zip(
        *(
            _placements(*placed, ids.ndim, fully_sharded.is_of_batch(mesh, dim))
            for dim, placed in enumerate(
                zip(
                    local_tensors.placements_of(table, mesh),
                    local_tensors.placements_of(ids, mesh),
                )
            )
        )
    )
    ids_shape = ids.shape
    ids = local_tensors.local_part(ids, mesh, of_ids)
    if not isinstance(table, DTensor):
        table = placement.replicate(table, mesh)
    local_table = table.redistribute(placements=of_table).to_local(
        grad_placements=of_gradient
    )
    if Shard(0) in of_table:
        _check_ids(ids, table.shape[0])
        _, offset = placement.extent(table.shape, mesh, of_table)
        ids = ids - offset[0]
        held = (ids >= 0) & (ids < local_table.shape[0])
        result = original(torch.where(held, ids, 0), local_table)
        result = torch.where(held.unsqueeze(-1), result, 0)
    else:
        result = original(ids, local_table)
    shape = (*ids_shape, table.shape[1])
    return sequence_parallel.reduced(
        _FromParts.apply(result, mesh, of_result, shape)
    )


class _FromParts(torch.autograd.Function):
    """Returns the DTensor of shards.

    Unlike `DTensor.from_local` it has right second derivatives: what reads the
    gradient of partial sums gives partial sums itself.
    """

    @staticmethod
    def forward(ctx, local, mesh, placements, shape):
        ctx.mesh, ctx.placements = mesh, placements
        return local_tensors.wrap_parts(local.detach(), mesh, placements, shape)

    @staticmethod
    def backward(ctx, gradient):
        if not isinstance(gradient, DTensor):
            gradient = placement.replicate(gradient, ctx.mesh)
        summed = placement.summed(ctx.placements)
        if gradient.placements != summed:
            gradient = gradient.redistribute(placements=summed)
        local = gradient.to_local(grad_placements=ctx.placements)
        return local, None, None, None


def _placements(of_table, of_ids, ids_ndim, is_of_batch):
    """Returns the placements of table, ids, the table's gradient and result.

    Args:
        of_table: Placement of the table on a mesh dim, as given.
        of_ids: Placement of the ids on the same mesh dim.
        ids_ndim: Int. Number of dims of the ids.
        is_of_batch: Boolean. Whether the mesh dim splits batches. A table that
            it splits too is gathered.
    """
    if of_ids.is_shard() and is_of_batch:
        return Replicate(), of_ids, Partial(), of_ids
    if of_table == Shard(0):
        # Each process looks up the ids of its rows, and the rows are added up.
        return of_table, Replicate(), of_table, Partial()
    if of_table.is_shard():
        # Each process looks up its part of each row.
        return of_table, Replicate(), of_table, Shard(ids_ndim)
    if of_ids.is_shard():
        return Replicate(), of_ids, Partial(), of_ids
    return (Replicate(),) * 4


def _check_ids(ids, rows):
    """Raises if the table has no row for an id, as on one device.

    On CPU the ids are read here. On GPU the check runs asynchronously, and the
    error appears at the next synchronization. A compiled step has the check as
    an operation.
    """
    outside = (ids < 0) | (ids >= rows)
    if not ids.is_cpu or torch.compiler.is_compiling():
        torch._assert_async(~outside.any(), "An id is outside of its table.")
    elif outside.any():
        raise IndexError(
            f"The table of {current_path() or 'an embedding'} has {rows} rows, "
            f"so ids must be at least 0 and less than {rows}. Received: an id "
            f"of {ids[outside][0].item()}"
        )
