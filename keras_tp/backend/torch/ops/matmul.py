"""Products of two tensors, computed by each process on its shards.

DTensor decomposes `einsum` and `matmul` into some twenty operations, forward
and backward, and dispatches each. Here the placements of the result are
computed once for each pair of specs, and the product of the shards is one
operation. Other equations, and operands with different splits, are left to
DTensor.
"""

import functools
import math
import string

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec

# Not `torch.einsum`, which is hooked.
from torch.functional import einsum as plain_einsum

from keras_tp.backend.torch import fully_sharded
from keras_tp.backend.torch import overlap
from keras_tp.backend.torch import placement
from keras_tp.backend.torch import sequence_parallel
from keras_tp.backend.torch.ops import product_specs


def settled(original):
    """Wraps a function: partial sums in its result are all-reduced."""

    @functools.wraps(original)
    def contraction(*args, **kwargs):
        return placement.settled(original(*args, **kwargs))

    return contraction


def einsum(original):
    """Wraps `torch.einsum`; partial sums are added up."""

    @functools.wraps(original)
    def replacement(*args):
        if len(args) == 3 and _are_distributed(*args[1:]):
            return _einsum(*args)
        return sequence_parallel.reduced(original(*args))

    return replacement


@torch.compiler.allow_in_graph
def _einsum(equation, x, y):
    """Returns the product of two DTensors, its partial sums added up."""
    x = sequence_parallel.gathered(x, y)
    result = _product(equation.replace(" ", ""), x, y)
    if result is None:
        result = plain_einsum(equation, x, y)
    return sequence_parallel.reduced(result)


def matmul(original):
    """Wraps `torch.matmul`; partial sums are added up."""

    @torch.compiler.allow_in_graph
    def of_dtensors(x, y):
        x = sequence_parallel.gathered(x, y)
        result = _matmul(x, y)
        if result is None:
            result = original(x, y)
        return sequence_parallel.reduced(result)

    @functools.wraps(original)
    def replacement(x, y, *args, **kwargs):
        if args or kwargs:
            return sequence_parallel.reduced(original(x, y, *args, **kwargs))
        if _are_distributed(x, y):
            return of_dtensors(x, y)
        if torch.compiler.is_compiling():
            # torch's compiler knows the function by its name, which is hooked.
            return sequence_parallel.reduced(torch.Tensor.matmul(x, y))
        return sequence_parallel.reduced(original(x, y))

    return replacement


def _matmul(x, y):
    """Returns `x @ y`; `None` if it is left to DTensor.

    A batch times a matrix, as in a dense layer, or two batches of matrices. A
    batch dim of size 1 that the other broadcasts is left out, such as the one
    head of keys in multi-query attention. DTensor would expand it, and gather
    the other's heads.
    """
    if y.ndim == 2:
        batch = string.ascii_lowercase[: x.ndim - 1]
        return _product(f"{batch}K,KN->{batch}N", x, y)
    if x.ndim < 2 or y.ndim < 2:
        return None
    count = max(x.ndim, y.ndim) - 2
    letters = string.ascii_lowercase[:count]
    named = []
    for tensor, other, matrix in ((x, y, "MK"), (y, x, "KN")):
        first = count - (tensor.ndim - 2)
        others = (1,) * (count - (other.ndim - 2)) + tuple(other.shape[:-2])
        kept = ""
        for i in reversed(range(tensor.ndim - 2)):
            if tensor.shape[i] == 1 and others[first + i] != 1:
                if any(p.is_shard(i) for p in tensor.placements):
                    return None
                tensor = tensor.squeeze(i)
            else:
                kept = letters[first + i] + kept
        named.append((kept + matrix, tensor))
    (left, x), (right, y) = named
    return _product(f"{left},{right}->{letters}MN", x, y)


def _are_distributed(x, y):
    return isinstance(x, DTensor) and isinstance(y, DTensor)


def _product(equation, x, y):
    """Returns the product; a sum over a split dim stays `Partial`.

    Args:
        equation: String without spaces.
        x: DTensor.
        y: DTensor.

    Returns:
        DTensor; `None` if the product is left to DTensor.
    """
    if x.dtype != y.dtype:
        return None
    x = _split_like(equation, x, y)
    left, comma, rest = equation.partition(",")
    right, arrow, out = rest.partition("->")
    y = _split_like(f"{right}{comma}{left}{arrow}{out}", y, x)
    spec = product_specs.spec_of(equation, x._spec, y._spec)
    if spec is not None:
        return _applied(equation, spec, y.placements, x, y)
    placements = fully_sharded.gathered_placements(y)
    if placements is not None:
        whole = DTensorSpec(
            y.device_mesh, placements, tensor_meta=y._spec.tensor_meta
        )
        spec = product_specs.spec_of(equation, x._spec, whole)
    if spec is None:
        return None
    return _applied(equation, spec, placements, x, y)


def _split_like(equation, x, y):
    """Returns a whole operand in parts, if the other's parts need no more.

    So are repeated KV heads, which each device has, beside its query heads.
    DTensor would gather the query heads.
    """
    placements = product_specs.split_like(equation, x._spec, y._spec)
    return x if placements == x.placements else _Part.apply(x, placements)


class _Part(torch.autograd.Function):
    """The parts of a whole tensor. Its gradient stays in parts, too."""

    @staticmethod
    def forward(ctx, x, placements):
        return x.redistribute(placements=placements)

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


def _applied(equation, spec, placements, x, y):
    """Returns the product of shards.

    Args:
        equation: String without spaces.
        spec: `DTensorSpec` of the product.
        placements: Tuple, those that `y` has in the product. A fully sharded
            kernel is gathered for them, and only its part is kept for the
            backward pass.
        x: DTensor.
        y: DTensor.
    """
    how = equation, spec, placements
    if not (torch.is_grad_enabled() and x.requires_grad):
        return _Product.apply(*how, x, y)
    if not _sums_gradient(x, spec):
        return _Product.apply(*how, x, y)
    number = overlap.number_below(x)
    if number is None:
        overlap.complete_before_a_fork(x)
    if number is None or not y.requires_grad:
        return _Product.apply(*how, x, y)
    # In a tuple, autograd does not see an operand.
    product = _KernelPart.apply(*how, (x,), y)
    product.grad_fn._set_sequence_nr(number)
    return _InputPart.apply(*how, x, (y,), product)


def _sums_gradient(x, spec):
    """Returns whether the gradient of `x` is a sum over devices.

    So it is in a column-parallel layer: each device has all of `x`, and a part
    of the product.
    """
    return any(
        before.is_replicate() and placement.is_shard(after)
        for before, after in zip(x.placements, spec.placements)
    )


class _Product(torch.autograd.Function):
    """The product of shards; its gradients are products of the same kind."""

    @staticmethod
    def forward(ctx, equation, spec, placements, x, y):
        ctx.how = equation, spec, placements
        ctx.save_for_backward(x, y)
        return _forward(equation, spec, placements, x, y)

    @staticmethod
    def backward(ctx, gradient):
        x, y = ctx.saved_tensors
        gradient = _of_product(ctx.how, gradient)
        of_x = of_y = None
        if ctx.needs_input_grad[3]:
            of_x = _of_x(ctx.how, gradient, y)
        if ctx.needs_input_grad[4]:
            of_y = _of_y(ctx.how, gradient, x, y.placements)
        return None, None, None, of_x, of_y


class _KernelPart(torch.autograd.Function):
    """The product of shards, with a gradient of the kernel only.

    It and `_InputPart` do the work of `_Product`, in two nodes that autograd's
    engine can run apart from each other.
    """

    @staticmethod
    def forward(ctx, equation, spec, placements, held, y):
        (x,) = held
        ctx.how, ctx.placements = (equation, spec, placements), y.placements
        ctx.save_for_backward(x)
        return _forward(equation, spec, placements, x, y)

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        of_y = _of_y(ctx.how, gradient, x, ctx.placements)
        return None, None, None, None, of_y


class _InputPart(torch.autograd.Function):
    """Gives a product a gradient of its input.

    The product's own gradient goes on to `_KernelPart`.
    """

    @staticmethod
    def forward(ctx, equation, spec, placements, x, held, product):
        ctx.how = equation, spec, placements
        ctx.save_for_backward(*held)
        return DTensor(product._local_tensor, spec, requires_grad=False)

    @staticmethod
    def backward(ctx, gradient):
        (y,) = ctx.saved_tensors
        gradient = _of_product(ctx.how, gradient)
        return None, None, None, _of_x(ctx.how, gradient, y), None, gradient


def _forward(equation, spec, placements, x, y):
    y = _placed(y, placements)
    local = _local_product(equation, x._local_tensor, y._local_tensor)
    return DTensor(local.contiguous(), spec, requires_grad=False)


def _of_product(how, gradient):
    """Returns the gradient of a product, placed as its partial sums need it."""
    _, spec, _ = how
    # Each partial sum has the gradient of the whole sum.
    placements = placement.summed(spec.placements)
    if not isinstance(gradient, DTensor):
        gradient = placement.replicate(gradient, spec.mesh)
    return _placed(gradient, placements)


def _of_x(how, gradient, y):
    equation, _, placements = how
    left, right, out = product_specs.operands(equation)
    return _product(f"{out},{right}->{left}", gradient, _placed(y, placements))


def _of_y(how, gradient, x, placements):
    left, right, out = product_specs.operands(how[0])
    of_y = _product(f"{left},{out}->{right}", x, gradient)
    return _placed(of_y, placements) if placements != how[2] else of_y


def _local_product(equation, x, y):
    """Returns the product of two plain tensors.

    torch computes every `einsum` as a batched product. If there is no dim of a
    batch, and both operands are matrices once their neighboring dims are
    merged, one product of matrices is faster.
    """
    found = _as_matrices(equation)
    if found is None:
        return plain_einsum(equation, x, y)
    swapped, transposed, count = found
    if swapped:
        x, y = y, x
    # Where the dims of an operand are parted: those summed from the others.
    of_x = count if transposed[0] else x.ndim - count
    of_y = y.ndim - count if transposed[1] else count
    shape = x.shape[of_x:] if transposed[0] else x.shape[:of_x]
    shape += y.shape[:of_y] if transposed[1] else y.shape[of_y:]
    x = x.reshape(math.prod(x.shape[:of_x]), math.prod(x.shape[of_x:]))
    y = y.reshape(math.prod(y.shape[:of_y]), math.prod(y.shape[of_y:]))
    x = x.t() if transposed[0] else x
    y = y.t() if transposed[1] else y
    return torch.mm(x, y).reshape(shape)


@functools.lru_cache(maxsize=4096)
def _as_matrices(equation):
    """Returns how a product is one of two matrices; `None` if it is not.

    Returns:
        Whether the operands change places, a pair that says which of them is
        transposed then, and the number of dims that are summed.
    """
    left, right, out = product_specs.operands(equation)
    for swapped in (False, True):
        first, second = (right, left) if swapped else (left, right)
        rows = "".join(a for a in first if a not in second)
        columns = "".join(a for a in second if a not in first)
        summed = "".join(a for a in first if a not in out)
        if not summed or out != rows + columns:
            continue
        if first in (rows + summed, summed + rows):
            if second in (summed + columns, columns + summed):
                transposed = (
                    first != rows + summed,
                    second != summed + columns,
                )
                return swapped, transposed, len(summed)
    return None


def _placed(tensor, placements):
    if tensor.placements == placements:
        return tensor
    return tensor.redistribute(placements=placements)
