"""Softmax, its loss and argmax over a split dim of classes.

The logits of a split vocabulary are the largest tensor of a language model.
They are never gathered: each process reduces over the classes it holds, and
only the reduced tensors are communicated (the vocabulary-parallel loss of
Megatron-LM, https://arxiv.org/abs/1909.08053, section 3). These handlers run
below autograd.
"""

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Partial
from torch.distributed.tensor import Replicate
from torch.distributed.tensor import Shard
from torch.distributed.tensor._utils import (
    compute_local_shape_and_global_offset,
)

from keras_tp.backend.torch import local_tensors


class _Split:
    """How a tensor with a dim of classes is split.

    Args:
        tensor: DTensor.
        dim: Int, the dim of the classes.
    """

    def __init__(self, tensor, dim):
        self.mesh = tensor.device_mesh
        self.dim = dim % max(tensor.ndim, 1)
        counts = {}
        self.placements = []
        for index, placed in enumerate(tensor.placements):
            if placed.is_shard():
                counts.setdefault(placed.dim, 1)
                counts[placed.dim] *= self.mesh.size(index)
            self.placements.append(placed)
        for index, placed in enumerate(self.placements):
            if not placed.is_shard() or (
                tensor.shape[placed.dim] % counts[placed.dim]
            ):
                self.placements[index] = Replicate()
        self.over_classes = Shard(self.dim) in self.placements
        shape, offset = compute_local_shape_and_global_offset(
            tensor.shape, self.mesh, self.placements
        )
        self.first = offset[self.dim] if shape else 0
        self.classes = tensor.shape[self.dim] if shape else 1

    def part(self, tensor):
        """Returns this process's shard of a tensor of the same shape."""
        return local_tensors.local_part(tensor, self.mesh, self.placements)

    def whole(self, local):
        """Returns the DTensor of a shard."""
        return local_tensors.wrap_parts(local, self.mesh, self.placements)

    def reduced(self, local, kind):
        """Reduces over the classes of all processes, by one all-reduce.

        Args:
            local: Tensor, this process's result; the classes' dim has size 1.
            kind: String, `"sum"` or `"max"`.

        Returns:
            Tensor of the same shape.
        """
        placements = [
            Partial(kind) if p == Shard(self.dim) else p
            for p in self.placements
        ]
        return local_tensors.settled_parts(
            local, self.mesh, placements
        )._local_tensor

    def gathered(self, local):
        """Returns all processes' results, joined along the classes' dim."""
        placements = [
            Replicate() if p == Shard(self.dim) else p for p in self.placements
        ]
        whole = self.whole(local).redistribute(placements=placements)
        return whole._local_tensor

    def without_classes(self):
        """Returns the placements of a tensor without the classes' dim."""
        return [
            Replicate()
            if p == Shard(self.dim)
            else Shard(p.dim - 1)
            if p.is_shard() and p.dim > self.dim
            else p
            for p in self.placements
        ]


def softmax(op, args, kwargs):
    """Runs `softmax` or `log_softmax`.

    If the classes are split, two tensors of the logits' shape without `dim` are
    all-reduced: the maxima and the sums of the exponentials.
    """
    x, dim, to_float32 = args
    split = _Split(x, dim)
    local = split.part(x)
    if not split.over_classes:
        return split.whole(op(local, dim, to_float32))
    if to_float32:
        local = local.float()
    maxima = split.reduced(local.amax(dim, keepdim=True), "max")
    shifted = local - maxima
    exponentials = shifted.exp()
    total = split.reduced(exponentials.sum(dim, keepdim=True), "sum")
    if op is torch.ops.aten._log_softmax.default:
        return split.whole(shifted - total.log())
    return split.whole(exponentials / total)


def softmax_backward(op, args, kwargs):
    """Returns the gradient of `softmax`: one sum is all-reduced."""
    gradient, output, dim, dtype = args
    split = _Split(output, dim)
    gradient, output = split.part(gradient), split.part(output)
    if not split.over_classes:
        return split.whole(op(gradient, output, dim, dtype))
    if op is torch.ops.aten._log_softmax_backward_data.default:
        total = split.reduced(gradient.sum(dim, keepdim=True), "sum")
        result = gradient - output.exp() * total
    else:
        weighted = gradient * output
        total = split.reduced(weighted.sum(dim, keepdim=True), "sum")
        result = weighted - output * total
    return split.whole(result.to(dtype))


def class_loss(op, args, kwargs):
    """Runs `nll_loss` over log probabilities, without a reduction.

    If the classes are split, each process looks up the targets in its own
    classes, with zeros for the others, and one all-reduce adds the results.
    With class weights or a reduction, the loss is computed whole.
    """
    x, target, weight, reduction, ignored = args
    if not _by_part(x, weight, reduction):
        return local_tensors.replicated(op, args, kwargs)
    split = _Split(x, 1)
    local = split.part(x)
    local_target = local_tensors.local_part(
        target, split.mesh, split.without_classes()
    )
    index, held = _held(local, local_target, split, ignored)
    result = -torch.where(held, local.gather(1, index), 0)
    result = split.reduced(result, "sum")
    total_weight = local.new_zeros(())
    return (
        local_tensors.wrap_parts(
            result.squeeze(1), split.mesh, split.without_classes()
        ),
        local_tensors.wrap_parts(
            total_weight, split.mesh, [Replicate()] * split.mesh.ndim
        ),
    )


def class_loss_backward(op, args, kwargs):
    """Returns the gradient of `class_loss`, without an all-reduce."""
    gradient, x, target, weight, reduction, ignored = args[:6]
    if not _by_part(x, weight, reduction):
        return local_tensors.replicated(op, args, kwargs)
    split = _Split(x, 1)
    local = split.part(x)
    gradient, target = (
        local_tensors.local_part(tensor, split.mesh, split.without_classes())
        for tensor in (gradient, target)
    )
    index, held = _held(local, target, split, ignored)
    values = -torch.where(held, gradient.unsqueeze(1), 0)
    return split.whole(torch.zeros_like(local).scatter(1, index, values))


def _by_part(x, weight, reduction):
    split = isinstance(x, DTensor) and any(p.is_shard() for p in x.placements)
    # 0 stands for "none": Keras weights and reduces by itself.
    return split and x.ndim > 1 and weight is None and reduction == 0


def _held(local, target, split, ignored):
    """Returns the targets' local class indices, and a mask of those held."""
    target = target.unsqueeze(1)
    counted = target != ignored
    torch._assert_async(
        (~counted | ((target >= 0) & (target < split.classes))).all(),
        f"A target is not one of the {split.classes} classes.",
    )
    index = target - split.first
    held = (index >= 0) & (index < local.shape[1]) & counted
    return torch.where(held, index, 0), held


def argmax(op, args, kwargs):
    """Runs `argmax` along a dim; gathers one candidate per process."""
    x = args[0]
    given = dict(zip(("dim", "keepdim"), args[1:]), **kwargs)
    dim, keepdim = given.get("dim"), given.get("keepdim", False)
    if dim is None or x.ndim == 0:
        return local_tensors.replicated(op, args, kwargs)
    split = _Split(x, dim)
    local = split.part(x)
    result = local.argmax(split.dim, keepdim=True)
    if split.over_classes:
        largest = split.gathered(local.gather(split.dim, result))
        classes = split.gathered(result + split.first)
        result = classes.gather(
            split.dim, largest.argmax(split.dim, keepdim=True)
        )
    placements = split.without_classes()
    if keepdim:
        placements = [
            Replicate() if p == Shard(split.dim) else p
            for p in split.placements
        ]
    else:
        result = result.squeeze(split.dim)
    return local_tensors.wrap_parts(result, split.mesh, placements)


def logsumexp(op, args, kwargs):
    """Runs `logsumexp`; over split dims, maxima and sums are all-reduced.

    DTensor's own `logsumexp` still treats a reduced dim of size 1 as split.
    """
    x, dims, *rest = args
    keepdim = rest[0] if rest else kwargs.get("keepdim", False)
    dims = [dims] if isinstance(dims, int) else list(dims)
    dims = sorted({dim % x.ndim for dim in dims or range(x.ndim)})
    mesh = x.device_mesh
    placements = [p if p.is_shard() else Replicate() for p in x.placements]
    local = local_tensors.local_part(x, mesh, placements)

    def reduced(local, kind):
        summed = [
            Partial(kind) if p.is_shard() and p.dim in dims else p
            for p in placements
        ]
        return local_tensors.settled_parts(local, mesh, summed)._local_tensor

    maxima = reduced(local.amax(dims, keepdim=True), "max")
    # An infinite maximum is not subtracted: inf - inf is NaN.
    maxima = torch.where(maxima.abs() == torch.inf, 0, maxima)
    total = reduced((local - maxima).exp().sum(dims, keepdim=True), "sum")
    result = total.log() + maxima
    kept = [
        Replicate() if p.is_shard() and p.dim in dims else p for p in placements
    ]
    if not keepdim:
        result = result.squeeze(dims)
        kept = [
            Shard(p.dim - sum(dim < p.dim for dim in dims))
            if p.is_shard()
            else p
            for p in kept
        ]
    return local_tensors.wrap_parts(result, mesh, kept)
