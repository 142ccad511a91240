"""Convolutions and poolings on a mesh.

DTensor's own want whole channels, so those whose channels may be split are
made of `windows`.
"""

import functools
import math

import tensorflow as tf
from keras.src.layers.convolutional.base_conv import BaseConv
from keras.src.layers.convolutional.base_conv_transpose import BaseConvTranspose
from tensorflow.experimental import dtensor

from keras_tp.backend.tensorflow import boundary
from keras_tp.backend.tensorflow import placement
from keras_tp.backend.tensorflow.ops import sliding_windows

_CHANNELS = "DTensor's own wants whole channels"


def _is_tensor(x):
    return tf.is_tensor(x) or isinstance(x, tf.Variable)


def batch_parallel(original, *args, **kwargs):
    """Runs an operation on whole features; only the batch may be split.

    What is split is gathered for the operation (weights too, which are
    gathered as they are used and stay split where they are stored), and its
    gradients come back the same way.
    """
    mesh, axis = placement.current_mesh(), placement.batch_axis()
    first = True
    placed = []
    for x in args:
        if _is_tensor(x) and len(x.shape) > 1:
            x = tf.convert_to_tensor(x)
            layout = boundary.batch_layout(
                x.shape, mesh, axis if first else None
            )
            x = dtensor.relayout(x, layout)
            first = False
        placed.append(x)
    outputs = original(*placed, **kwargs)
    # The gradient arrives in this layout too.
    return dtensor.relayout(
        outputs, boundary.batch_layout(outputs.shape, mesh, axis)
    )


def _split_channels(kernel):
    """Returns the mesh axes that split a kernel's last two dims.

    Args:
        kernel: Tensor. What is computed from variables, and not just read from
            one, counts as whole.

    Returns:
        Pair of strings or `None`. The axis that splits batches is none for
        channels: what it splits is put together.
    """
    specs = placement.specs_of(kernel)
    if specs is None:
        return None, None
    return tuple(
        None if axis in (dtensor.UNSHARDED, placement.batch_axis()) else axis
        for axis in specs[-2:]
    )


def why_gathered(variable, layer):
    """See `distribution_lib.why_gathered`."""
    if not isinstance(layer, (BaseConv, BaseConvTranspose)):
        return ""
    specs = placement.specs_of(variable)
    positions = specs[: len(layer.kernel_size)]
    if len(specs) <= len(positions):
        # A bias.
        return ""
    if getattr(layer, "groups", 1) > 1:
        kernel = "a kernel of several groups"
    elif layer.data_format == "channels_first":
        kernel = "a kernel where channels come first"
    elif getattr(layer, "lora_enabled", False):
        kernel = "a kernel that is computed from several variables"
    elif any(axis != dtensor.UNSHARDED for axis in positions):
        kernel = "a kernel whose window is split"
    else:
        return ""
    return (
        "stored split, computed whole: TensorFlow's DTensor has no expansion "
        f"of a convolution with {kernel}"
    )


def _lay_out(image, channel_axis):
    """Splits an image over the batch and the channels."""
    mesh, axis = placement.current_mesh(), placement.batch_axis()
    specs = boundary.batch_layout(image.shape, mesh, axis).sharding_specs
    specs = [*specs[:-1], channel_axis or dtensor.UNSHARDED]
    return dtensor.relayout(image, dtensor.Layout(specs, mesh))


def _check_channels_last(what, data_format, padding):
    first = data_format is not None and data_format.startswith("NC")
    if first or not isinstance(padding, str):
        raise NotImplementedError(
            f"Under a distribution, {what} needs channels last, and padding "
            f"'same' or 'valid'. Received: data_format={data_format!r}, "
            f"padding={padding!r}"
        )


def _channels_first(data_format):
    return data_format is not None and data_format.startswith("NC")


def convolution(
    original,
    input,  # noqa: A002
    filters,
    strides=None,
    padding="VALID",
    data_format=None,
    dilations=None,
    name=None,
):
    """Of windows where the kernel is split, or where there is no other way.

    DTensor has no convolution of one dim, and TensorFlow's CPU kernels no
    gradient of a dilated one, or of one of three dims that has groups. Groups,
    and channels that come first, are convolved whole.
    """
    rank = len(input.shape) - 2
    axes = _split_channels(filters)
    grouped = (
        not _channels_first(data_format)
        and filters.shape[-2] != input.shape[-1]
    )
    no_other_way = (
        rank == 1
        or max(sliding_windows.per_dim(dilations, rank)) > 1
        or (rank == 3 and grouped)
    )
    if _channels_first(data_format) and (no_other_way or rank == 3):
        given = strides, padding, None, dilations
        x = tf.transpose(input, [0, *range(2, rank + 2), 1])
        y = convolution(original, x, filters, *given)
        return tf.transpose(y, [0, rank + 1, *range(1, rank + 1)])
    if no_other_way:
        _check_channels_last(
            "a convolution of 1 dim, or dilated,", data_format, padding
        )
        if grouped:
            count = input.shape[-1] // filters.shape[-2]
            filters = tf.convert_to_tensor(filters)
            whole = dtensor.Layout.replicated(
                placement.current_mesh(), len(filters.shape)
            )
            groups = zip(
                tf.split(input, count, axis=-1),
                tf.split(dtensor.relayout(filters, whole), count, axis=-1),
            )
            given = strides, padding, data_format, dilations
            return tf.concat(
                [convolution(original, x, w, *given) for x, w in groups], -1
            )
    elif grouped or not any(axes) or _channels_first(data_format):
        return batch_parallel(
            original,
            input,
            filters,
            strides=strides,
            padding=padding,
            data_format=data_format,
        )
    x, kernel = tf.convert_to_tensor(input), tf.convert_to_tensor(filters)
    window = sliding_windows.window(
        x.shape[1:-1], kernel.shape[:-2], strides, padding, dilations
    )

    @placement.custom_gradient
    def convolve(x, kernel):
        x = _lay_out(x, axes[0])
        y = sliding_windows.correlate(x, kernel, window)

        def gradient(dy):
            dy = _lay_out(dy, axes[1])
            dx = sliding_windows.spread(dy, kernel, window, x.shape[1:-1])
            return (
                _lay_out(dx, axes[0]),
                sliding_windows.kernel_gradient(x, dy, window),
            )

        return _lay_out(y, axes[1]), gradient

    return convolve(x, kernel)


def conv_transpose(
    original,
    input,  # noqa: A002
    filters,
    output_shape,
    strides,
    padding="SAME",
    data_format=None,
    dilations=None,
    name=None,
):
    """Of windows where the kernel is split: a convolution's gradient."""
    axes = _split_channels(filters)
    if not any(axes) or _channels_first(data_format):
        return batch_parallel(
            original,
            input,
            filters,
            output_shape,
            strides,
            padding=padding,
            data_format=data_format,
            dilations=dilations,
        )
    y, kernel = tf.convert_to_tensor(input), tf.convert_to_tensor(filters)
    image = tuple(int(tf.get_static_value(n)) for n in output_shape[1:-1])
    window = sliding_windows.window(
        image, kernel.shape[:-2], strides, padding, dilations
    )

    @placement.custom_gradient
    def convolve(y, kernel):
        y = _lay_out(y, axes[1])
        x = sliding_windows.spread(y, kernel, window, image)

        def gradient(dx):
            dx = _lay_out(dx, axes[0])
            dy = sliding_windows.correlate(dx, kernel, window)
            return (
                _lay_out(dy, axes[1]),
                sliding_windows.kernel_gradient(dx, y, window),
            )

        return _lay_out(x, axes[0]), gradient

    return convolve(y, kernel)


def conv1d(
    original,
    input,  # noqa: A002
    filters,
    stride,
    padding,
    data_format="NWC",
    dilations=None,
    name=None,
):
    """The same as `convolution`."""
    return convolution(
        None, input, filters, stride, padding, data_format, dilations
    )


def pool(
    original,
    input,  # noqa: A002
    window_shape,
    pooling_type,
    strides=None,
    padding="VALID",
    data_format=None,
    dilations=None,
    name=None,
):
    """Mean or maximum of what the positions in a window see."""
    _check_channels_last("pooling", data_format, padding)
    x = tf.convert_to_tensor(input)
    window = sliding_windows.window(
        x.shape[1:-1], window_shape, strides, padding, dilations
    )
    if pooling_type == "MAX":
        # The gradient goes to the first of several, as TensorFlow's does.
        return functools.reduce(
            tf.maximum, sliding_windows.views(x, window, outside=x.dtype.min)
        )
    # What pads an image does not count.
    ones = tf.ones([1, *x.shape[1:-1], 1], x.dtype)
    count = sum(sliding_windows.views(ones, window))
    return sum(sliding_windows.views(x, window)) / count


def max_pool(
    original,
    input,  # noqa: A002
    ksize,
    strides,
    padding,
    data_format=None,
    name=None,
):
    """TensorFlow's own where nothing but the batch can be split."""
    mesh, axis = placement.current_mesh(), placement.batch_axis()
    if axis is not None and mesh.dim_size(axis) == mesh.size:
        return batch_parallel(
            original, input, ksize, strides, padding, data_format
        )
    return pool(None, input, ksize, "MAX", strides, padding, data_format)


def avg_pool(
    original,
    input,  # noqa: A002
    ksize,
    strides,
    padding,
    data_format=None,
    name=None,
):
    """DTensor has no gradient of TensorFlow's own."""
    return pool(None, input, ksize, "AVG", strides, padding, data_format)


def depthwise_conv2d(
    original,
    input,  # noqa: A002
    filter,  # noqa: A002
    strides,
    padding,
    data_format=None,
    dilations=None,
    name=None,
):
    """Adds up what the positions in a window see, each times its weight."""
    _check_channels_last("a depthwise convolution", data_format, padding)
    x, kernel = tf.convert_to_tensor(input), tf.convert_to_tensor(filter)
    window = sliding_windows.window(
        x.shape[1:-1], kernel.shape[:2], strides, padding, dilations
    )
    positions = tf.reshape(kernel, [-1, *kernel.shape[2:]])
    total = sum(
        tf.expand_dims(view, -1) * positions[i : i + 1]
        for i, view in enumerate(sliding_windows.views(x, window))
    )
    return tf.reshape(total, [*total.shape[:3], math.prod(kernel.shape[2:])])


def separable_conv2d(
    original,
    input,  # noqa: A002
    depthwise_filter,
    pointwise_filter,
    strides,
    padding,
    data_format=None,
    dilations=None,
    name=None,
):
    """A depthwise convolution and one of size 1."""
    x = depthwise_conv2d(
        None, input, depthwise_filter, strides, padding, data_format, dilations
    )
    return tf.nn.conv2d(x, pointwise_filter, 1, "VALID")


def conv2d(
    original,
    input,  # noqa: A002
    filters,
    strides,
    padding,
    data_format="NHWC",
    dilations=None,
    name=None,
):
    """The same as `convolution`."""
    return convolution(
        tf.nn.convolution,
        input,
        filters,
        strides,
        padding,
        data_format,
        dilations,
    )


def bias_add(original, value, bias, data_format=None, name=None):
    """Where channels come first DTensor splits the batch as the bias is."""
    if not _channels_first(data_format):
        return original(value, bias, data_format, name)
    shape = [1, -1] + [1] * (len(value.shape) - 2)
    return value + tf.reshape(bias, shape)


RULES = [
    ("tensorflow:nn", "bias_add", bias_add, "DTensor splits another dim"),
    *(
        ("tensorflow:nn", name, rule, _CHANNELS)
        for name, rule in {
            "convolution": convolution,
            "conv1d": conv1d,
            "conv2d": conv2d,
            "conv_transpose": conv_transpose,
            "max_pool": max_pool,
            "pool": pool,
            "avg_pool": avg_pool,
            "depthwise_conv2d": depthwise_conv2d,
            "separable_conv2d": separable_conv2d,
        }.items()
    ),
]
