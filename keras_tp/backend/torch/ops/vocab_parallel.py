"""Softmax, its loss and argmax over a split dim of classes.

The logits of a split vocabulary are the largest tensor of a language model.
They are never gathered: each process reduces over the classes it holds, and
only the reduced tensors are communicated (the vocabulary-parallel loss of
Megatron-LM, https://arxiv.org/abs/1909.08053, section 3). These handlers run
below autograd.
"""

import copy

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Partial
from torch.distributed.tensor import Replicate
from torch.distributed.tensor import Shard

from keras_tp.backend.torch import local_tensors
from keras_tp.backend.torch import placement

aten = torch.ops.aten


class _Split:
    """How a tensor with dims of classes is split.

    Args:
        tensor: DTensor. A dim with an empty shard is computed whole.
        *dims: Ints, the dims of the classes.
    """

    def __init__(self, tensor, *dims):
        self.mesh = tensor.device_mesh
        self.dims = [dim % max(tensor.ndim, 1) for dim in dims]
        self.shape = tuple(tensor.shape)
        self.counts = [1] * tensor.ndim
        for size, placed in zip(self.mesh.shape, tensor.placements):
            if placed.is_shard():
                self.counts[placed.dim] *= size
        self.placements = [
            placed
            if placed.is_shard() and self._has_all_parts(placed.dim)
            else Replicate()
            for placed in tensor.placements
        ]
        self.over_classes = any(map(self._splits_classes, self.placements))

    def _has_all_parts(self, dim):
        size, count = self.shape[dim], self.counts[dim]
        return size > -(-size // count) * (count - 1)

    def _shape_with(self, size):
        """Returns the shape with this size of the classes' dims."""
        return tuple(
            size if dim in self.dims else own
            for dim, own in enumerate(self.shape)
        )

    def _splits_classes(self, placed):
        return placed.is_shard() and placed.dim in self.dims

    def first(self, shape):
        """Returns the index of this process's first class."""
        _, offset = placement.extent(shape, self.mesh, self.placements)
        return offset[self.dims[0]]

    def part(self, tensor):
        """Returns this process's shard of a tensor of the same shape."""
        return local_tensors.local_part(tensor, self.mesh, self.placements)

    def whole(self, local):
        """Returns the DTensor of a shard."""
        return local_tensors.wrap_parts(
            local, self.mesh, self.placements, self.shape
        )

    def reduced(self, local, kind):
        """Returns a local result reduced over all classes, by an all-reduce.

        Args:
            local: Tensor in which the classes' dims have size 1.
            kind: String, `"sum"` or `"max"`.
        """
        placements = [
            Partial(kind) if self._splits_classes(p) else p
            for p in self.placements
        ]
        return local_tensors.settled_parts(
            local, self.mesh, placements, self._shape_with(1)
        )._local_tensor

    def whole_classes(self):
        """Returns how the tensor is split with its classes gathered."""
        split = copy.copy(self)
        split.placements = self.placements_of_result(keepdim=True)
        split.over_classes = False
        return split

    def smallest(self):
        """Returns the size of the smallest shard of the classes' dim."""
        size, count = self.shape[self.dims[0]], self.counts[self.dims[0]]
        return size - -(-size // count) * (count - 1)

    def gathered(self, local):
        """Returns all processes' results, joined along the classes' dim.

        Args:
            local: Tensor, of the same size on all processes.
        """
        (dim,) = self.dims
        joined = self._shape_with(self.counts[dim] * local.shape[dim])
        whole = local_tensors.wrap_parts(
            local, self.mesh, self.placements, joined
        ).redistribute(placements=self.placements_of_result(keepdim=True))
        return whole._local_tensor

    def placements_of_result(self, keepdim=False):
        """Returns the placements of a tensor reduced over the classes."""
        return [
            Replicate()
            if p.is_replicate() or self._splits_classes(p)
            else p
            if keepdim
            else Shard(p.dim - sum(dim < p.dim for dim in self.dims))
            for p in self.placements
        ]

    def result(self, local, keepdim=False, size=1):
        """Returns the DTensor of a result with `size` values per sample."""
        shape = self._shape_with(size)
        if not keepdim:
            local = local.squeeze(self.dims)
            shape = [n for i, n in enumerate(shape) if i not in self.dims]
        return local_tensors.wrap_parts(
            local, self.mesh, self.placements_of_result(keepdim), shape
        )


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
    # In place where possible: each tensor here is as large as the logits.
    shifted = local - maxima
    if op is aten._log_softmax.default:
        sums = shifted.exp().sum(dim, keepdim=True)
        return split.whole(shifted.sub_(split.reduced(sums, "sum").log()))
    exponentials = shifted.exp_()
    sums = exponentials.sum(dim, keepdim=True)
    return split.whole(exponentials.div_(split.reduced(sums, "sum")))


def softmax_backward(op, args, kwargs):
    """Returns the gradient of `softmax`: one sum is all-reduced."""
    gradient, output, dim, dtype = args
    split = _Split(output, dim)
    gradient, output = split.part(gradient), split.part(output)
    if not split.over_classes:
        return split.whole(op(gradient, output, dim, dtype))
    if op is aten._log_softmax_backward_data.default:
        total = split.reduced(gradient.sum(dim, keepdim=True), "sum")
        result = output.exp().mul_(-total).add_(gradient)
    else:
        weighted = gradient * output
        total = split.reduced(weighted.sum(dim, keepdim=True), "sum")
        result = weighted.sub_(output * total)
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
    index, held = _held(x.shape, local, target, split, ignored)
    result = -torch.where(held, local.gather(1, index), 0)
    total_weight = local_tensors.wrap_parts(
        local.new_zeros(()), split.mesh, [Replicate()] * split.mesh.ndim
    )
    return split.result(split.reduced(result, "sum")), total_weight


def class_loss_backward(op, args, kwargs):
    """Returns the gradient of `class_loss`, without an all-reduce."""
    gradient, x, target, weight, reduction, ignored = args[:6]
    if not _by_part(x, weight, reduction):
        return local_tensors.replicated(op, args, kwargs)
    split = _Split(x, 1)
    local = split.part(x)
    gradient = local_tensors.local_part(
        gradient, split.mesh, split.placements_of_result()
    )
    index, held = _held(x.shape, local, target, split, ignored)
    values = -torch.where(held, gradient.unsqueeze(1), 0)
    return split.whole(torch.zeros_like(local).scatter_(1, index, values))


def _by_part(x, weight, reduction):
    split = isinstance(x, DTensor) and any(p.is_shard() for p in x.placements)
    # 0 stands for "none": Keras weights and reduces by itself.
    return split and x.ndim > 1 and weight is None and reduction == 0


def _held(shape, local, target, split, ignored):
    """Returns the targets' local class indices, and a mask of those held."""
    target = local_tensors.local_part(
        target, split.mesh, split.placements_of_result()
    ).unsqueeze(1)
    counted = target != ignored
    torch._assert_async(
        (~counted | ((target >= 0) & (target < shape[1]))).all(),
        f"A target is not one of the {shape[1]} classes.",
    )
    index = target - split.first(shape)
    held = (index >= 0) & (index < local.shape[1]) & counted
    return torch.where(held, index, 0), held


def argmax(op, args, kwargs):
    """Runs `argmax` along a dim; gathers one candidate per process."""
    x = args[0]
    given = dict(zip(("dim", "keepdim"), args[1:]), **kwargs)
    if given.get("dim") is None or x.ndim == 0:
        return local_tensors.replicated(op, args, kwargs)
    split = _Split(x, given["dim"])
    (dim,) = split.dims
    local = split.part(x)
    result = local.argmax(dim, keepdim=True)
    if split.over_classes:
        largest = split.gathered(local.gather(dim, result))
        classes = split.gathered(result + split.first(x.shape))
        result = classes.gather(dim, largest.argmax(dim, keepdim=True))
    return split.result(result, given.get("keepdim", False))


def topk(op, args, kwargs):
    """Runs `topk` along a dim; gathers `k` candidates per process."""
    given = {"dim": -1, "largest": True, "sorted": True}
    given.update(zip(("x", "k", "dim", "largest", "sorted"), args), **kwargs)
    x, k, is_sorted = given["x"], given["k"], given["sorted"]
    split = _Split(x, given["dim"])
    (dim,) = split.dims
    if split.over_classes and x.device.type == "cpu" and not is_sorted:
        # On CPUs torch sorts all the same if there are 64 values for each that
        # is wanted. If not, the order depends on all values. Random numbers
        # are drawn for the values in this order.
        is_sorted = 64 * k <= x.shape[dim]
        if not is_sorted:
            split = split.whole_classes()
    if split.over_classes and k > split.smallest():
        split = split.whole_classes()
    order = (dim, given["largest"], is_sorted)
    values, classes = op(split.part(x), k, *order)
    if split.over_classes:
        values = split.gathered(values)
        classes = split.gathered(classes + split.first(x.shape))
        values, chosen = op(values, k, *order)
        classes = classes.gather(dim, chosen)
    return tuple(
        split.result(local, keepdim=True, size=k) for local in (values, classes)
    )


def multinomial(op, args, kwargs):
    """Draws classes of split probabilities; the same as on one device.

    torch draws one class, or different ones, as the largest of the
    probabilities divided by exponential noise. Each process draws all of the
    noise and uses its part.
    """
    x, count, *others = args
    replacement = others[0] if others else kwargs.get("replacement", False)
    split = _Split(x, -1)
    if not split.over_classes or (replacement and count > 1):
        return local_tensors.replicated(op, args, kwargs)
    local = split.part(x)
    torch._assert_async(
        ((local >= 0) & (local < torch.inf)).all(),
        "Probabilities should be finite and not negative.",
    )
    noise = torch.empty(x.shape, dtype=x.dtype, device=local.device)
    noise.exponential_(generator=kwargs.get("generator"))
    scores = split.whole(local / split.part(noise))
    if count == 1:
        return scores.argmax(-1, keepdim=True)
    return scores.topk(count).indices


def logsumexp(op, args, kwargs):
    """Runs `logsumexp`; over split dims, maxima and sums are all-reduced.

    DTensor's own `logsumexp` still treats a reduced dim of size 1 as split.
    """
    x, dims, *keepdim = args
    dims = [dims] if isinstance(dims, int) else list(dims)
    split = _Split(x, *(dims or range(x.ndim)))
    local = split.part(x)
    maxima = split.reduced(local.amax(split.dims, keepdim=True), "max")
    # An infinite maximum is not subtracted: inf - inf is NaN.
    maxima = torch.where(maxima.abs() == torch.inf, 0, maxima)
    exponentials = (local - maxima).exp()
    total = split.reduced(exponentials.sum(split.dims, keepdim=True), "sum")
    keepdim = keepdim[0] if keepdim else kwargs.get("keepdim", False)
    return split.result(total.log() + maxima, keepdim)
