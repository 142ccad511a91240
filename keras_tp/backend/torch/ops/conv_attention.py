"""Convolutions and attention that run on shards."""

import collections

from torch.distributed.tensor import Partial
from torch.distributed.tensor import Replicate
from torch.distributed.tensor import Shard

from keras_tp.backend.torch import local_tensors
from keras_tp.backend.torch import placement


class _Plan(collections.namedtuple("_Plan", ["x", "weight", "bias", "result"])):
    """How a convolution is split: the placements of its tensors."""

    @property
    def is_row(self):
        """Whether the input channels are split, and the results summed."""
        return any(placed.is_partial() for placed in self.result)


def convolution(op, args, kwargs):
    """Runs a convolution, transposed or not, on this process's shard."""
    x, weight, bias, *settings, groups = args
    mesh = local_tensors.mesh_of(args, kwargs)
    plan, groups = _plan(x, weight, settings[3], groups)
    if bias is not None:
        bias = local_tensors.local_part(bias, mesh, plan.bias)
    result = op(
        local_tensors.local_part(x, mesh, plan.x),
        local_tensors.local_part(weight, mesh, plan.weight),
        None if plan.is_row else bias,
        *settings,
        groups,
    )
    result = local_tensors.settled_parts(result, mesh, plan.result)
    if plan.is_row and bias is not None:
        # Added once, after the all-reduce.
        bias = bias.reshape(-1, *(1 for _ in x.shape[2:]))
        result = local_tensors.wrap_parts(
            result._local_tensor + bias, mesh, result.placements
        )
    return result


def convolution_backward(op, args, kwargs):
    """Returns the gradients of `convolution`; sums stay `Partial`."""
    gradient, x, weight, bias_sizes, *settings, groups, mask = args
    mesh = local_tensors.mesh_of(args, kwargs)
    plan, groups = _plan(x, weight, settings[3], groups)
    gradient = local_tensors.local_part(
        gradient, mesh, placement.summed(plan.result)
    )
    results = op(
        gradient,
        local_tensors.local_part(x, mesh, plan.x),
        local_tensors.local_part(weight, mesh, plan.weight),
        bias_sizes and [gradient.shape[1]],
        *settings,
        groups,
        mask,
    )
    placements = (
        # Each process has a term of the gradient of what it holds whole.
        [
            Partial() if own.is_replicate() and of_result.is_shard() else own
            for own, of_result in zip(placed, plan.result)
        ]
        for placed in plan
    )
    return tuple(
        None
        if result is None
        else local_tensors.wrap_parts(result, mesh, placed)
        for result, placed in zip(results, placements)
    )


def _plan(x, weight, transposed, groups):
    """Returns the `_Plan` of a convolution, and the groups of each process."""
    mesh = local_tensors.mesh_of((x, weight), {})
    out_dim, in_dim = (1, 0) if transposed else (0, 1)
    whole = Replicate()
    rows = []
    left = groups
    for size, of_x, of_weight in zip(
        mesh.shape,
        local_tensors.placements_of(x, mesh),
        local_tensors.placements_of(weight, mesh),
    ):
        # The placements of input, kernel, bias and result.
        row = whole, whole, whole, whole
        if of_x == Shard(0):
            # The batch is split.
            row = of_x, whole, whole, Shard(0)
        elif groups == 1 and of_weight == Shard(out_dim):
            # Each process computes its own output channels.
            row = whole, of_weight, Shard(0), Shard(1)
        elif groups == 1 and of_weight == Shard(in_dim):
            # Each process has some input channels, and a term of the sum.
            row = Shard(1), of_weight, whole, Partial()
        elif groups > 1 and left % size == 0 and of_weight == Shard(0):
            # Each process has whole groups, as in a depthwise convolution: the
            # kernel's first dim lists the channels group by group.
            row = Shard(1), of_weight, Shard(0), Shard(1)
            left //= size
        rows.append(row)
    return _Plan(*zip(*rows)), left


def cpu_attention(op, args, kwargs):
    """Runs CPU flash attention, or its gradient, on own batch and heads."""
    mesh = local_tensors.mesh_of(args, kwargs)
    # Forward, the tensors are query, key and value. Backward, the gradient is
    # before them, and the result and its logsumexp are after them.
    count, first = (6, 1) if "backward" in op.name() else (3, 0)
    query, key, value = args[first : first + 3]
    placements = _attention_placements((query, key, value), mesh)
    tensors = [
        local_tensors.local_part(t, mesh, placements) for t in args[:count]
    ]
    if kwargs.get("attn_mask") is not None:
        mask = _local_mask(kwargs["attn_mask"], query.ndim, mesh, placements)
        kwargs = {**kwargs, "attn_mask": mask}
    # Dim 0 of each result is the batch, dim 1 the heads.
    return tuple(
        local_tensors.wrap_parts(result, mesh, placements)
        for result in op(*tensors, *args[count:], **kwargs)
    )


def _attention_placements(tensors, mesh):
    """Returns placements over batch and heads that fit query, key and value."""
    kept = []
    counts = {0: 1, 1: 1}
    for size, of_query in zip(
        mesh.shape, local_tensors.placements_of(tensors[0], mesh)
    ):
        split = of_query.is_shard() and of_query.dim in counts
        if split:
            counts[of_query.dim] *= size
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
