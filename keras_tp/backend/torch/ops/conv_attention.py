"""Convolutions, attention and embeddings that run on shards."""

import functools

import torch
from keras.src.backend.common.name_scope import current_path
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Partial
from torch.distributed.tensor import Replicate
from torch.distributed.tensor import Shard

from keras_tp.backend.torch import local_tensors
from keras_tp.backend.torch import placement

aten = torch.ops.aten

# A convolution has one of these modes for each mesh dim (Keras's kernel is
# (*window, in, out)):
#   column: splits the output channels. Each process computes its own.
#   row: splits the input channels. The partial sums are all-reduced.
#   groups: splits both; each process has whole groups (depthwise).
#   data: splits the batch.
#   whole: splits nothing. Every process computes everything.


def convolution(op, args, kwargs):
    """Runs a convolution, transposed or not, on this process's shard."""
    (x, weight, bias, stride, padding, dilation, transposed, output_padding) = (
        args[:8]
    )
    groups = args[8]
    mesh = local_tensors.mesh_of(args, kwargs)
    modes = _convolution_modes(x, weight, transposed, groups)
    plan = _convolution_plan(modes, transposed)
    local_x = local_tensors.local_part(x, mesh, plan["x"])
    local_weight = local_tensors.local_part(weight, mesh, plan["weight"])
    # In row mode the bias is added once, after the all-reduce.
    add_bias = bias is not None and "row" in modes
    local_bias = None
    if bias is not None and not add_bias:
        local_bias = local_tensors.local_part(bias, mesh, plan["bias"])
    result = op(
        local_x,
        local_weight,
        local_bias,
        stride,
        padding,
        dilation,
        transposed,
        output_padding,
        _local_groups(groups, modes, mesh),
    )
    result = local_tensors.settled_parts(result, mesh, plan["result"])
    if add_bias:
        shape = (1, -1) + (1,) * (x.ndim - 2)
        bias = local_tensors.local_part(bias, mesh, plan["bias"]).reshape(shape)
        result = local_tensors.wrap_parts(
            result._local_tensor + bias, mesh, result.placements
        )
    return result


def convolution_backward(op, args, kwargs):
    """Returns the gradients of `convolution`; sums stay `Partial`."""
    (gradient, x, weight, bias_sizes, stride, padding, dilation) = args[:7]
    transposed, output_padding, groups, mask = args[7:]
    mesh = local_tensors.mesh_of(args, kwargs)
    modes = _convolution_modes(x, weight, transposed, groups)
    plan = _convolution_plan(modes, transposed)
    whole = [Replicate() if p.is_partial() else p for p in plan["result"]]
    local_gradient = local_tensors.local_part(gradient, mesh, whole)
    if bias_sizes is not None:
        channels = local_gradient.shape[1]
        bias_sizes = [channels]
    results = op(
        local_gradient,
        local_tensors.local_part(x, mesh, plan["x"]),
        local_tensors.local_part(weight, mesh, plan["weight"]),
        bias_sizes,
        stride,
        padding,
        dilation,
        transposed,
        output_padding,
        _local_groups(groups, modes, mesh),
        mask,
    )
    placements = (
        plan["x_gradient"],
        plan["weight_gradient"],
        plan["bias_gradient"],
    )
    return tuple(
        None
        if result is None
        else local_tensors.wrap_parts(result, mesh, placed)
        for result, placed in zip(results, placements)
    )


def _convolution_modes(x, weight, transposed, groups):
    """Returns the mode of each mesh dim, from the arguments' placements."""
    mesh = local_tensors.mesh_of((x, weight), {})
    x_placements = local_tensors.placements_of(x, mesh)
    weight_placements = local_tensors.placements_of(weight, mesh)
    out_dim, in_dim = (1, 0) if transposed else (0, 1)
    left = groups
    modes = []
    for dim in range(mesh.ndim):
        size = mesh.size(dim)
        of_x, of_weight = x_placements[dim], weight_placements[dim]
        mode = "whole"
        if of_x == Shard(0):
            mode = "data"
        elif groups == 1:
            if of_weight == Shard(out_dim):
                mode = "column"
            elif of_weight == Shard(in_dim):
                mode = "row"
        elif left % size == 0 and Shard(0) == of_weight:
            # The kernel's first dim lists the channels group by group.
            mode = "groups"
            left //= size
        modes.append(mode)
    return modes


def _convolution_plan(modes, transposed):
    """Returns a dict of tensor name to its placements, one per mesh dim."""
    out_dim, in_dim = (1, 0) if transposed else (0, 1)
    rows = {
        "column": {
            "x": Replicate(),
            "weight": Shard(out_dim),
            "bias": Shard(0),
            "result": Shard(1),
            "x_gradient": Partial(),
            "weight_gradient": Shard(out_dim),
            "bias_gradient": Shard(0),
        },
        "row": {
            "x": Shard(1),
            "weight": Shard(in_dim),
            "bias": Replicate(),
            "result": Partial(),
            "x_gradient": Shard(1),
            "weight_gradient": Shard(in_dim),
            "bias_gradient": Replicate(),
        },
        "groups": {
            "x": Shard(1),
            "weight": Shard(0),
            "bias": Shard(0),
            "result": Shard(1),
            "x_gradient": Shard(1),
            "weight_gradient": Shard(0),
            "bias_gradient": Shard(0),
        },
        "data": {
            "x": Shard(0),
            "weight": Replicate(),
            "bias": Replicate(),
            "result": Shard(0),
            "x_gradient": Shard(0),
            "weight_gradient": Partial(),
            "bias_gradient": Partial(),
        },
        "whole": dict.fromkeys(
            (
                "x",
                "weight",
                "bias",
                "result",
                "x_gradient",
                "weight_gradient",
                "bias_gradient",
            ),
            Replicate(),
        ),
    }
    return {
        name: [rows[mode][name] for mode in modes] for name in rows["whole"]
    }


def _local_groups(groups, modes, mesh):
    for dim, mode in enumerate(modes):
        if mode == "groups":
            groups //= mesh.size(dim)
    return groups


def cpu_attention(op, args, kwargs):
    """Runs CPU flash attention on this process's batch and heads."""
    mesh = local_tensors.mesh_of(args, kwargs)
    placements = _attention_placements(args[:3], mesh)
    query, key, value = (
        local_tensors.local_part(t, mesh, placements) for t in args[:3]
    )
    kwargs = dict(kwargs)
    if kwargs.get("attn_mask") is not None:
        kwargs["attn_mask"] = _local_mask(
            kwargs["attn_mask"], args[0].ndim, mesh, placements
        )
    result, logsumexp = op(query, key, value, *args[3:], **kwargs)
    # Dim 0 of both is the batch, dim 1 the heads.
    return (
        local_tensors.wrap_parts(result, mesh, placements),
        local_tensors.wrap_parts(logsumexp, mesh, placements),
    )


def cpu_attention_backward(op, args, kwargs):
    """Returns the gradients of `cpu_attention`."""
    mesh = local_tensors.mesh_of(args, kwargs)
    placements = _attention_placements(args[1:4], mesh)
    tensors = [local_tensors.local_part(t, mesh, placements) for t in args[:6]]
    kwargs = dict(kwargs)
    if kwargs.get("attn_mask") is not None:
        kwargs["attn_mask"] = _local_mask(
            kwargs["attn_mask"], args[1].ndim, mesh, placements
        )
    results = op(*tensors, *args[6:], **kwargs)
    return tuple(
        local_tensors.wrap_parts(result, mesh, placements) for result in results
    )


def _attention_placements(tensors, mesh):
    """Returns placements over batch and heads that fit query, key and value."""
    kept = []
    counts = {0: 1, 1: 1}
    for dim, of_query in enumerate(
        local_tensors.placements_of(tensors[0], mesh)
    ):
        split = of_query.is_shard() and of_query.dim in counts
        if split:
            counts[of_query.dim] *= mesh.size(dim)
            split = all(
                t.shape[of_query.dim] % counts[of_query.dim] == 0
                for t in tensors
            )
        kept.append(of_query if split else Replicate())
    return kept


def _local_mask(mask, ndim, mesh, placements):
    """Returns this process's part of a mask, which may broadcast."""
    missing = ndim - mask.ndim
    placements = [
        Shard(p.dim - missing)
        if p.is_shard() and p.dim >= missing and mask.shape[p.dim - missing] > 1
        else Replicate()
        for p in placements
    ]
    return local_tensors.local_part(mask, mesh, placements)


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
    """Wraps `torch.nn.functional.embedding` for split tables.

    If the rows are split, each process looks up the ids of its rows, and one
    all-reduce adds the results. If the columns are split, each process looks
    up its part of each row.
    """

    @functools.wraps(original)
    def lookup(
        input,
        weight,
        padding_idx=None,
        max_norm=None,
        norm_type=2.0,
        scale_grad_by_freq=False,
        sparse=False,
    ):
        tensors = (input, weight)
        if not any(isinstance(t, DTensor) for t in tensors):
            return original(
                input,
                weight,
                padding_idx,
                max_norm,
                norm_type,
                scale_grad_by_freq,
                sparse,
            )
        if padding_idx is not None or max_norm is not None:
            raise NotImplementedError(
                "A distributed embedding has no `padding_idx` and no "
                f"`max_norm`. Received: padding_idx={padding_idx}, "
                f"max_norm={max_norm}"
            )
        if scale_grad_by_freq or sparse:
            raise NotImplementedError(
                "A distributed embedding has dense gradients only. Received: "
                f"scale_grad_by_freq={scale_grad_by_freq}, sparse={sparse}"
            )
        return _embedding(original, input, weight)

    return lookup


def _check_ids(ids, rows):
    """Raises if the table has no row for an id, as on one device.

    On CPU the ids are read here. On GPU the check runs asynchronously, and the
    error appears at the next synchronization.
    """
    outside = (ids < 0) | (ids >= rows)
    if not ids.is_cpu:
        torch._assert_async(~outside.any(), "An id is outside of its table.")
    elif outside.any():
        raise IndexError(
            f"The table of {current_path() or 'an embedding'} has {rows} rows, "
            "and ids have to be at least 0 and less than that. Received: an id "
            f"of {ids[outside][0].item()}"
        )


def _embedding(original, ids, table):
    mesh = local_tensors.mesh_of((ids, table), {})
    ids_placed, gradient_placed, result_placed = [], [], []
    table_placed = []
    first, rows = 0, table.shape[0]
    split_rows = False
    of_ids = local_tensors.placements_of(ids, mesh)
    for dim, of_table in enumerate(local_tensors.placements_of(table, mesh)):
        ids_one, result_one, gradient_one = (Replicate(),) * 3
        if of_table == Shard(0):
            split_rows = True
            rows = -(-rows // mesh.size(dim))
            first += rows * mesh.get_local_rank(dim)
            result_one, gradient_one = Partial(), of_table
        elif of_table.is_shard():
            result_one, gradient_one = Shard(ids.ndim), of_table
        elif of_ids[dim].is_shard():
            ids_one = result_one = of_ids[dim]
            gradient_one = Partial()
        ids_placed.append(ids_one)
        result_placed.append(result_one)
        gradient_placed.append(gradient_one)
        table_placed.append(of_table if of_table.is_shard() else Replicate())
    local_ids = local_tensors.local_part(ids, mesh, ids_placed)
    if not isinstance(table, DTensor):
        table = placement.replicate(table, mesh)
    local_table = table.redistribute(placements=table_placed).to_local(
        grad_placements=gradient_placed
    )
    if split_rows:
        _check_ids(local_ids, table.shape[0])
        local_ids = local_ids - first
        held = (local_ids >= 0) & (local_ids < local_table.shape[0])
        result = original(torch.where(held, local_ids, 0), local_table)
        result = torch.where(held.unsqueeze(-1), result, 0)
    else:
        result = original(local_ids, local_table)
    result = DTensor.from_local(result, mesh, result_placed, run_check=False)
    if split_rows:
        result = result.redistribute(
            placements=[
                Replicate() if p.is_partial() else p for p in result_placed
            ]
        )
    return result
