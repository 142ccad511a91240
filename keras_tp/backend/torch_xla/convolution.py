"""Convolutions in groups, where XLA's partitioner computes a wrong gradient."""

import itertools

import torch
from keras.src.distribution.distribution_lib import distribution

from keras_tp.backend.torch_xla import placement


def conv(
    original, x, kernel, bias=None, stride=1, padding=0, dilation=1, groups=1
):
    """Wraps `torch.nn.functional.conv1d`, 2d and 3d.

    If the batch is split along one of two mesh axes and the convolution has
    groups, the gradient of the kernel is doubled, without an error (torch_xla
    2.9). Here it is a product for each place in the kernel.
    """
    mesh = getattr(distribution(), "device_mesh", None)
    is_wide = mesh is not None and max(mesh.shape) < mesh.devices.size
    if groups == 1 or not is_wide or not placement.is_xla(x):
        return original(x, kernel, bias, stride, padding, dilation, groups)
    rank = x.ndim - 2
    stride, dilation = (
        tuple(value) if isinstance(value, (list, tuple)) else (value,) * rank
        for value in (stride, dilation)
    )
    if padding:
        ends = _ends(padding, kernel.shape[2:], dilation)
        x = torch.nn.functional.pad(x, [n for pair in ends[::-1] for n in pair])
    outputs = _InGroups.apply(x, kernel, original, stride, dilation, groups)
    if bias is None:
        return outputs
    return outputs + bias.reshape(-1, *[1] * rank)


def _ends(padding, sizes, dilation):
    """Returns how much is added before and after each dim."""
    if padding == "valid":
        return [(0, 0)] * len(sizes)
    if padding == "same":
        added = [step * (size - 1) for step, size in zip(dilation, sizes)]
        return [(count // 2, count - count // 2) for count in added]
    if isinstance(padding, int):
        return [(padding, padding)] * len(sizes)
    return [(count, count) for count in padding]


class _InGroups(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, kernel, original, stride, dilation, groups):
        ctx.save_for_backward(x, kernel)
        ctx.options = stride, dilation, groups
        return original(x, kernel, None, stride, 0, dilation, groups)

    @staticmethod
    def backward(ctx, gradient):
        x, kernel = ctx.saved_tensors
        stride, dilation, groups = ctx.options
        of_x = of_kernel = None
        if ctx.needs_input_grad[0]:
            zeros = [0] * len(stride)
            of_x, _, _ = torch.ops.aten.convolution_backward(
                *(gradient, x, kernel, None, stride, zeros, dilation),
                *(False, zeros, groups, (True, False, False)),
            )
        if ctx.needs_input_grad[1]:
            of_kernel = _of_kernel(gradient, x, kernel.shape, *ctx.options)
        return of_x, of_kernel, None, None, None, None


def _of_kernel(gradient, x, shape, stride, dilation, groups):
    """Returns the gradient of a kernel of shape (outputs, inputs, dims)."""
    batch, _, *sizes = gradient.shape
    gradient = gradient.reshape(batch, groups, -1, *sizes)
    found = []
    for place in itertools.product(*map(range, shape[2:])):
        part = x[
            (
                slice(None),
                slice(None),
                *(
                    slice(at * wide, at * wide + (size - 1) * step + 1, step)
                    for at, wide, size, step in zip(
                        place, dilation, sizes, stride
                    )
                ),
            )
        ]
        part = part.reshape(batch, groups, -1, *sizes)
        found.append(torch.einsum("bgo...,bgi...->goi", gradient, part))
    return torch.stack(found, -1).reshape(shape)
