"""Convolutions on meshes of two axes, where XLA's partitioner is wrong.

With torch_xla 2.9, without an error:

- If height or width is split along one axis, and the kernel along another one,
  the outputs are wrong. So both are whole here, of images and of outputs; the
  channels are split as the kernel is.
- If the batch is split and the convolution has groups, the gradient of the
  kernel is doubled. Here it is a product for each place in the kernel.
"""

import itertools
import math

import torch
from keras.src import backend
from keras.src.backend.torch import nn
from keras.src.distribution.distribution_lib import distribution

from keras_tp.backend.torch_xla import placement

_nested = []


def is_wide():
    """Returns whether the mesh has several axes of several devices."""
    mesh = getattr(distribution(), "device_mesh", None)
    return mesh is not None and max(mesh.shape) < mesh.devices.size


class Functions:
    """Functions of `keras.src.backend.torch.nn`."""

    def conv(original, inputs, kernel, *args, **kwargs):
        return _laid_out(original, _of_conv, inputs, kernel, args, kwargs)

    def depthwise_conv(original, inputs, kernel, *args, **kwargs):
        return _laid_out(original, _of_depthwise, inputs, kernel, args, kwargs)

    def conv_transpose(original, inputs, kernel, *args, **kwargs):
        return _laid_out(original, _of_transposed, inputs, kernel, args, kwargs)

    def separable_conv(
        original,
        inputs,
        depthwise_kernel,
        pointwise_kernel,
        strides=1,
        padding="valid",
        data_format=None,
        dilation_rate=1,
    ):
        # As Keras does, but the kernels keep their layouts.
        x = nn.depthwise_conv(
            *(inputs, depthwise_kernel, strides, padding),
            *(data_format, dilation_rate),
        )
        return nn.conv(
            x,
            pointwise_kernel,
            data_format=data_format,
            dilation_rate=dilation_rate,
        )


def _of_conv(axes, has_groups):
    """Returns the mesh axes of the channels of inputs, and of outputs.

    Args:
        axes: Tuple, the mesh axis of each dim of the kernel, in Keras's order.
        has_groups: Boolean. Each group has its own inputs.
    """
    of_inputs, of_outputs = axes[-2:]
    return of_outputs if has_groups else of_inputs, of_outputs


def _of_depthwise(axes, has_groups):
    return axes[-2], axes[-2]


def _of_transposed(axes, has_groups):
    return axes[-1], axes[-2]


def _laid_out(original, channel_axes, inputs, kernel, args, kwargs):
    """Computes a convolution between inputs and outputs with a layout."""
    if _nested or not is_wide() or not placement.is_xla(inputs):
        return original(inputs, kernel, *args, **kwargs)
    given = [*args, *kwargs.values()]
    form = next((x for x in given if str(x).startswith("channels")), None)
    is_first = backend.standardize_data_format(form) == "channels_first"
    channels = 1 if is_first else inputs.ndim - 1
    layout = getattr(kernel, "_layout", None)
    axes = (None,) * len(kernel.shape) if layout is None else layout.axes
    has_groups = inputs.shape[channels] != kernel.shape[-2]
    of_inputs, of_outputs = channel_axes(axes, has_groups)
    _nested.append(True)
    try:
        inputs = _split(inputs, channels, of_inputs)
        outputs = original(inputs, kernel, *args, **kwargs)
        return _split(outputs, channels, of_outputs)
    finally:
        _nested.pop()


def _split(x, channels, axis):
    """Splits the batch and the channels of an image, and no other dim."""
    current = distribution()
    mesh = current.device_mesh.backend_mesh
    sizes = mesh.shape()
    layout = current.get_data_layout(tuple(x.shape))
    batch = placement.names_of(layout.axes[0])
    # A variable that is fully sharded is split over the batch axis too.
    own = [name for name in placement.names_of(axis) if name not in batch]
    axes = [None] * x.ndim
    for dim, names in ((0, batch), (channels, own)):
        if x.shape[dim] % math.prod(sizes[name] for name in names) == 0:
            axes[dim] = tuple(names) or None
    return placement.constrained(x, placement.Placement(mesh, tuple(axes)))


def conv(
    original, x, kernel, bias=None, stride=1, padding=0, dilation=1, groups=1
):
    """Wraps `torch.nn.functional.conv1d`, 2d and 3d."""
    if groups == 1 or not is_wide() or not placement.is_xla(x):
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
