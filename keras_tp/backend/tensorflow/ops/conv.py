"""Convolutions and poolings on a mesh.

DTensor's own need whole channels. If the channels may be split, they are built
from `sliding_windows`.
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

# Most positions of the kernel of a sequence that is kept once for each of them.
_LONG = 64


def batch_parallel(original, *args, **kwargs):
    """Runs an operation on whole features; only the batch may be split.

    Other split dims are gathered for the operation, and their gradients are
    split again. Weights are gathered too, but they are stored split.
    """
    mesh, axis = placement.current_mesh(), placement.batch_axis()
    first = True
    placed = []
    for x in args:
        is_tensor = tf.is_tensor(x) or isinstance(x, tf.Variable)
        if is_tensor and len(x.shape) > 1:
            x = tf.convert_to_tensor(x)
            layout = boundary.batch_layout(
                x.shape, mesh, axis if first else None
            )
            x = _gathered(x, layout)
            first = False
        placed.append(x)
    outputs = original(*placed, **kwargs)
    # The gradient of the outputs gets this layout too.
    return dtensor.relayout(
        outputs, boundary.batch_layout(outputs.shape, mesh, axis)
    )


def _gathered(x, layout):
    """Returns `x` in a layout, for an operation that needs it.

    The gradient gets it too. A relayout would give it the layout of `x`,
    which may be another one once all layouts of the step are known: an error.
    """

    def placed(x):
        return dtensor.relayout(x, layout)

    return tf.custom_gradient(lambda x: (placed(x), placed))(x)


def _split_channels(kernel):
    """Returns the mesh axes that split a kernel's last two dims, or `None`.

    A kernel counts as whole if it is computed from variables, not just read
    from one. The batch axis counts as `None`, because dims that it splits are
    gathered.
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
    positions = specs[: layer.rank]
    if len(specs) <= layer.rank:
        # A bias.
        return ""
    if getattr(layer, "groups", 1) > 1:
        kernel = "a kernel of several groups"
    elif layer.data_format == "channels_first" and (
        isinstance(layer, BaseConvTranspose)
        or not _needs_channels_last(layer.rank, layer.dilation_rate)
    ):
        kernel = "a kernel where channels come first"
    elif getattr(layer, "lora_enabled", False):
        kernel = "a kernel that is computed from several variables"
    elif any(axis != dtensor.UNSHARDED for axis in positions):
        kernel = "a kernel whose window is split"
    elif (
        not isinstance(layer, BaseConvTranspose)
        and max(layer.dilation_rate) == 1
        and _is_long(variable.shape[: layer.rank], layer.strides)
    ):
        kernel = f"a kernel of more than {_LONG} positions"
    else:
        return ""
    return (
        "stored split, computed whole: TensorFlow's DTensor has no expansion "
        f"of a convolution with {kernel}"
    )


def _is_long(sizes, strides):
    """Returns whether a kernel overlaps itself more often than is worthwhile.

    Sliding windows would keep a sequence once for each of its positions, and
    TensorFlow would compile an operation for each.
    """
    (size, *others), (stride, *_) = sizes, sliding_windows.per_dim(strides, 1)
    return not others and size > _LONG and stride < size


def _lay_out(image, channel_axis):
    """Splits the batch and the channels of an image."""
    mesh, axis = placement.current_mesh(), placement.batch_axis()
    specs = boundary.batch_layout(image.shape, mesh, axis).sharding_specs
    specs = [*specs[:-1], channel_axis or dtensor.UNSHARDED]
    return dtensor.relayout(image, dtensor.Layout(specs, mesh))


def _check_channels_last(what, data_format, padding):
    if _is_channels_first(data_format) or not isinstance(padding, str):
        raise NotImplementedError(
            f"Under a distribution, {what} needs channels last, and padding "
            f"'same' or 'valid'. Received: data_format={data_format!r}, "
            f"padding={padding!r}"
        )


def _is_channels_first(data_format):
    return data_format is not None and data_format.startswith("NC")


def _needs_windows(rank, dilations):
    """Returns whether TensorFlow's own convolution cannot run on a mesh.

    DTensor has none of 1 dim. TensorFlow's CPU kernels have no gradient of a
    dilated one.
    """
    return rank == 1 or max(sliding_windows.per_dim(dilations, rank)) > 1


def _needs_channels_last(rank, dilations):
    """Returns whether a channels-first image is transposed.

    The other kernels, undilated ones of 2 dims, are gathered.
    """
    return rank == 3 or _needs_windows(rank, dilations)


def convolution(
    original,
    input,
    filters,
    strides=None,
    padding="VALID",
    data_format=None,
    dilations=None,
    name=None,
):
    """Uses sliding windows if the kernel is split or nothing else works.

    Kernels with groups are gathered. TensorFlow's CPU kernels have no gradient
    of a 3D convolution with groups.
    """
    rank = len(input.shape) - 2
    channels_first = _is_channels_first(data_format)
    if channels_first and _needs_channels_last(rank, dilations):
        x = tf.transpose(input, [0, *range(2, rank + 2), 1])
        y = convolution(original, x, filters, strides, padding, None, dilations)
        return tf.transpose(y, [0, rank + 1, *range(1, rank + 1)])
    axes = _split_channels(filters)
    is_grouped = not channels_first and filters.shape[-2] != input.shape[-1]
    is_dilated = max(sliding_windows.per_dim(dilations, rank)) > 1
    is_whole = is_grouped or not any(axes)
    is_whole |= _is_long(filters.shape[:-2], strides)
    if rank == 1 and not is_dilated and is_whole:
        _check_channels_last("a 1D convolution", data_format, padding)
        return _convolution_of_rows(input, filters, strides, padding)
    if _needs_windows(rank, dilations) or (rank == 3 and is_grouped):
        _check_channels_last(
            "a 1D or dilated convolution", data_format, padding
        )
        if is_grouped:
            given = strides, padding, data_format, dilations
            apart = functools.partial(_group_by_group, original, given)
            return batch_parallel(apart, input, filters)
    elif is_grouped or channels_first or not any(axes):
        return batch_parallel(
            original,
            input,
            filters,
            strides=strides,
            padding=padding,
            data_format=data_format,
        )
    image = input.shape[1:-1]
    window = sliding_windows.window(
        image, filters.shape[:-2], strides, padding, dilations
    )
    return _convolve(input, filters, window, image, axes)


def _convolution_of_rows(input, filters, strides, padding):
    """Convolves a sequence as an image of one row.

    DTensor has no 1D convolution, and sliding windows would keep the sequence
    once for each position of the kernel.
    """
    (stride,) = sliding_windows.per_dim(strides, 1)
    rows = batch_parallel(
        tf.nn.conv2d,
        tf.expand_dims(input, 1),
        tf.expand_dims(filters, 0),
        strides=[1, 1, stride, 1],
        padding=padding,
    )
    return tf.squeeze(rows, 1)


def _group_by_group(original, given, input, filters):
    """Convolves whole channels, the groups one after the other."""
    count = input.shape[-1] // filters.shape[-2]
    groups = zip(
        tf.split(input, count, axis=-1), tf.split(filters, count, axis=-1)
    )
    return tf.concat(
        [convolution(original, x, w, *given) for x, w in groups], -1
    )


def conv_transpose(
    original,
    input,
    filters,
    output_shape,
    strides,
    padding="SAME",
    data_format=None,
    dilations=None,
    name=None,
):
    """Uses the gradient of a windowed convolution if the kernel is split."""
    axes = _split_channels(filters)
    if not any(axes) or _is_channels_first(data_format):
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
    image = tuple(int(tf.get_static_value(n)) for n in output_shape[1:-1])
    window = sliding_windows.window(
        image, filters.shape[:-2], strides, padding, dilations
    )
    return _convolve(input, filters, window, image, axes, is_transposed=True)


def _convolve(x, kernel, window, image, axes, is_transposed=False):
    """Convolves by sliding windows; transposed, it is the gradient of that.

    `image` is the spatial size of the larger image, and `axes` split its
    channels and those of the smaller one.
    """

    def correlate(x, kernel):
        return sliding_windows.correlate(x, kernel, window)

    def spread(y, kernel):
        return sliding_windows.spread(y, kernel, window, image)

    forward, backward = correlate, spread
    if is_transposed:
        forward, backward, axes = spread, correlate, axes[::-1]

    @placement.custom_gradient
    def convolve(x, kernel):
        x = _lay_out(x, axes[0])

        def gradient(dy):
            dy = _lay_out(dy, axes[1])
            ends = (dy, x) if is_transposed else (x, dy)
            return (
                _lay_out(backward(dy, kernel), axes[0]),
                sliding_windows.kernel_gradient(*ends, window),
            )

        return _lay_out(forward(x, kernel), axes[1]), gradient

    return convolve(tf.convert_to_tensor(x), tf.convert_to_tensor(kernel))


def conv1d(original, input, filters, stride, *args, **kwargs):
    """The same as `convolution`."""
    return convolution(original, input, filters, stride, *args, **kwargs)


def pool(
    original,
    input,
    window_shape,
    pooling_type,
    strides=None,
    padding="VALID",
    data_format=None,
    dilations=None,
    name=None,
):
    """Takes the mean or the maximum over the positions in a window."""
    _check_channels_last("pooling", data_format, padding)
    x = tf.convert_to_tensor(input)
    window = sliding_windows.window(
        x.shape[1:-1], window_shape, strides, padding, dilations
    )
    if pooling_type == "MAX":
        # Of equal maxima, the first gets the gradient, as in TensorFlow.
        return functools.reduce(
            tf.maximum, sliding_windows.views(x, window, outside=x.dtype.min)
        )
    # The padding does not count.
    ones = tf.ones([1, *x.shape[1:-1], 1], x.dtype)
    count = sum(sliding_windows.views(ones, window))
    return sum(sliding_windows.views(x, window)) / count


def max_pool(
    original, input, ksize, strides, padding, data_format=None, name=None
):
    """Uses TensorFlow's own if the mesh can split nothing but the batch."""
    mesh, axis = placement.current_mesh(), placement.batch_axis()
    if axis is not None and mesh.dim_size(axis) == mesh.size:
        return batch_parallel(
            original, input, ksize, strides, padding, data_format
        )
    return pool(None, input, ksize, "MAX", strides, padding, data_format)


def avg_pool(
    original, input, ksize, strides, padding, data_format=None, name=None
):
    """Uses windows, because DTensor has no gradient of TensorFlow's own."""
    return pool(None, input, ksize, "AVG", strides, padding, data_format)


def depthwise_conv2d(
    original,
    input,
    filter,
    strides,
    padding,
    data_format=None,
    dilations=None,
    name=None,
):
    """Sums the views of the positions in a window, each times its weight."""
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
    input,
    depthwise_filter,
    pointwise_filter,
    strides,
    padding,
    data_format=None,
    dilations=None,
    name=None,
):
    """Runs a depthwise convolution and then one of size 1."""
    x = depthwise_conv2d(
        None, input, depthwise_filter, strides, padding, data_format, dilations
    )
    return tf.nn.conv2d(x, pointwise_filter, 1, "VALID")


def bias_add(original, value, bias, data_format=None, name=None):
    """Adds a bias by broadcasting it.

    DTensor would split the batch by a channels-first bias. It cannot run the
    gradient of its own operation if the layouts of gradient and bias differ.
    """
    if _is_channels_first(data_format):
        bias = tf.reshape(bias, [1, -1] + [1] * (len(value.shape) - 2))
    return value + bias
