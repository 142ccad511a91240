"""Products, in the form in which XLA splits them.

torch multiplies tensors of more than three dims as matrices, with several dims
in one. XLA cannot split such a dim as its parts were, and gathers it. So these
products are written as `einsum`, for which torch_xla has an operation of XLA.

Each product with a column-parallel kernel, as those of queries, keys and
values, gives a part of the gradient of its input, which the devices add up.
XLA for CPUs adds up each of them. So the products read one copy of their input,
with a dim of devices in front. The gradients of the copy are added up on each
device before one sum over this dim.
"""

import math
import string

import torch
from keras.src.backend.torch import core
from keras.src.distribution.distribution_lib import distribution
from torch.utils.weak import WeakIdKeyDictionary

from keras_tp.backend import repeated_heads
from keras_tp.backend.torch_xla import placement

# Tensor -> its copies, by number of devices.
_copies = WeakIdKeyDictionary()


class Functions:
    """Functions of `keras.src.backend.torch.numpy`."""

    def matmul(original, x1, x2):
        if isinstance(x2, core.Variable) and len(x2.shape) == 2:
            x1 = core.convert_to_tensor(x1)
            dims = string.ascii_lowercase[: x1.ndim - 1]
            found = _column(f"{dims}y,yz->{dims}z", x1, x2)
            if found is not None:
                return found
        return original(x1, x2)

    def einsum(original, subscripts, *operands, **kwargs):
        if len(operands) == 2 and isinstance(operands[1], core.Variable):
            x = core.convert_to_tensor(operands[0])
            found = _column(subscripts.replace(" ", ""), x, operands[1])
            if found is not None:
                return found
        return original(subscripts, *operands, **kwargs)

    def repeat(original, x, repeats, axis=None):
        """Repeats KV heads that the devices do not divide by a lookup.

        Each device takes the heads of its query heads. Otherwise XLA splits a
        new dim, and gathers it in the backward pass.
        """
        if (
            placement.is_xla(x)
            and isinstance(repeats, int)
            and axis is not None
        ):
            size = x.shape[axis]
            if repeated_heads.only_repeated_divide(size, repeats):
                index = torch.arange(size).repeat_interleave(repeats)
                return torch.index_select(x, axis, index.to(x.device))
        return original(x, repeats, axis=axis)


def _column(subscripts, x, kernel):
    """Returns a product with a column-parallel kernel.

    Args:
        subscripts: String, as for `einsum`.
        x: Tensor.
        kernel: Keras variable.

    Returns:
        Tensor, or `None` if the product is not of this kind.
    """
    inputs, _, out = subscripts.partition("->")
    left, _, right = inputs.partition(",")
    if (
        not placement.is_xla(x)
        or not x.requires_grad
        or not torch.is_grad_enabled()
        or not (left + right + out).isalpha()
        or (len(left), len(right)) != (x.ndim, len(kernel.shape))
    ):
        return None
    dim, count = _split_dim(kernel)
    if dim is None or right[dim] in left or right[dim] not in out:
        return None
    value = core.convert_to_tensor(kernel)
    if value.dtype != x.dtype:
        return None
    new = next(c for c in string.ascii_uppercase if c not in subscripts)
    parts = f"{new}{right[dim]}"
    shape = list(value.shape)
    shape[dim : dim + 1] = count, shape[dim] // count
    result = torch.einsum(
        f"{new}{left},{right.replace(right[dim], parts)}->"
        f"{out.replace(right[dim], parts)}",
        _copied(x, count),
        value.reshape(shape),
    )
    return result.flatten(out.index(right[dim]), out.index(right[dim]) + 1)


def _split_dim(kernel):
    """Returns the dim of a kernel that is split evenly, and its parts.

    Dims that the axis of the batch splits are gathered before the product.
    """
    layout = kernel._layout
    if layout is None or layout.device_mesh is None:
        return None, None
    mesh = layout.device_mesh
    sizes = dict(zip(mesh.axis_names, mesh.shape))
    batch = getattr(distribution(), "batch_dim_name", None)
    found = []
    for dim, axis in enumerate(layout.axes):
        names = [n for n in placement.names_of(axis) if n != batch]
        count = math.prod(sizes[name] for name in names)
        if count > 1:
            found.append((dim, count))
    if len(found) != 1 or kernel.shape[found[0][0]] % found[0][1]:
        return None, None
    return found[0]


def _copied(x, count):
    """Returns a tensor with a dim of devices in front, always the same one."""
    copies = _copies.setdefault(x, {})
    if count not in copies:
        ones = x.new_ones((count,) + (1,) * x.ndim)
        # A view would keep the tensor, and so its key here.
        copies[count] = x.unsqueeze(0) * ones
    return copies[count]


def matmul(original, x1, x2, *args, **kwargs):
    """Multiplies stacks of matrices; `original` is `torch.matmul`."""
    if (
        placement.is_xla(x1)
        and placement.is_xla(x2)
        and min(x1.ndim, x2.ndim) >= 2
        and max(x1.ndim, x2.ndim) >= 3
        and not (args or kwargs)
        and x1.is_floating_point()
    ):
        letters = string.ascii_lowercase
        stack = letters[: max(x1.ndim, x2.ndim) - 2]
        # A dim of size 1 is repeated.
        sizes = torch.broadcast_shapes(x1.shape[:-2], x2.shape[:-2])
        if x1.ndim > 2:
            x1 = x1.expand(*sizes[-(x1.ndim - 2) :], *x1.shape[-2:])
        if x2.ndim > 2:
            x2 = x2.expand(*sizes[-(x2.ndim - 2) :], *x2.shape[-2:])
        left, right = stack[-(x1.ndim - 2) :], stack[-(x2.ndim - 2) :]
        left, right = left * (x1.ndim > 2), right * (x2.ndim > 2)
        return torch.einsum(f"{left}xy,{right}yz->{stack}xz", x1, x2)
    return original(x1, x2, *args, **kwargs)


def attention(
    original,
    query,
    key,
    value,
    attn_mask=None,
    dropout_p=0.0,
    is_causal=False,
    scale=None,
    **kwargs,
):
    """Computes attention of split heads; `original` is torch's function."""
    if not placement.is_xla(query) or query.ndim != 4 or dropout_p or kwargs:
        return original(
            query,
            key,
            value,
            attn_mask=attn_mask,
            dropout_p=dropout_p,
            is_causal=is_causal,
            scale=scale,
            **kwargs,
        )
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    scores = torch.matmul(query * scale, key.transpose(-1, -2))
    if is_causal:
        size = scores.shape[-2:]
        attn_mask = torch.ones(size, dtype=torch.bool, device="xla").tril()
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attn_mask, -math.inf)
    elif attn_mask is not None:
        scores = scores + attn_mask
    return torch.matmul(torch.softmax(scores, -1), value)
