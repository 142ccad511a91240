"""Convolutions and poolings: storage is split, the computation is not.

DTensor has no expansion of either whose channels are split.
"""

import functools
import itertools

import tensorflow as tf
from tensorflow.experimental import dtensor

from keras_tp.backend.tensorflow import placement

_WHOLE = "whole features: DTensor cannot split the channels of a convolution"


def _is_tensor(x):
    return tf.is_tensor(x) or isinstance(x, tf.Variable)


def batch_parallel(original, *args, **kwargs):
    """Runs an operation on whole features; only the batch may be split.

    DTensor has no expansion of convolutions and poolings whose channels are
    split. What is split is gathered for the operation (weights too, which are
    gathered as they are used and stay split where they are stored), and its
    gradients come back the same way.
    """
    mesh, axis = placement.current_mesh(), placement.batch_axis()
    first = True
    placed = []
    for x in args:
        if _is_tensor(x) and len(x.shape) > 1:
            x = tf.convert_to_tensor(x)
            layout = placement.batch_layout(
                x.shape, mesh, axis if first else None
            )
            x = dtensor.relayout(x, layout)
            first = False
        placed.append(x)
    outputs = original(*placed, **kwargs)
    # The gradient arrives in this layout too.
    return dtensor.relayout(
        outputs, placement.batch_layout(outputs.shape, mesh, axis)
    )


def _positional(names):
    """Returns `batch_parallel` for tensors that may be given by name."""

    def rule(original, *args, **kwargs):
        args = list(args)
        for name in names[len(args) :]:
            if name not in kwargs:
                break
            args.append(kwargs.pop(name))
        return batch_parallel(original, *args, **kwargs)

    return rule


def _windows(x, sizes, strides, padding, dilations):
    """Yields `(position, image)` for each position of a sliding window.

    Args:
        x: Tensor of shape `(batch, *spatial, channels)`.
        sizes: Tuple of ints, the size of the window in each spatial dim.
        strides: Tuple of ints.
        padding: String, `"SAME"` or `"VALID"`.
        dilations: Tuple of ints.
    """
    spans = [(size - 1) * by + 1 for size, by in zip(sizes, dilations)]
    if padding.upper() == "SAME":
        pads = []
        for size, span, step in zip(x.shape[1:], spans, strides):
            missing = max((-(-size // step) - 1) * step + span - size, 0)
            pads.append((missing // 2, missing - missing // 2))
        x = tf.pad(x, [(0, 0), *pads, (0, 0)])
    ends = [
        (size - span) // step * step + 1
        for size, span, step in zip(x.shape[1:], spans, strides)
    ]
    for position in itertools.product(*(range(size) for size in sizes)):
        starts = [i * by for i, by in zip(position, dilations)]
        index = [
            slice(start, start + end, step)
            for start, end, step in zip(starts, ends, strides)
        ]
        yield position, x[(slice(None), *index)]


def _per_dim(value, rank):
    """Returns a stride or the like as one int for each spatial dim."""
    if value is None:
        return (1,) * rank
    if isinstance(value, int):
        return (value,) * rank
    value = tuple(int(v) for v in value)
    if len(value) == 1:
        return value * rank
    return value[1:-1] if len(value) == rank + 2 else value


def _check_layout_of_images(what, data_format, padding):
    first = data_format is not None and data_format.startswith("NC")
    if first or not isinstance(padding, str):
        raise NotImplementedError(
            f"Under a distribution, {what} needs channels last, and padding "
            f"'same' or 'valid'. Received: data_format={data_format!r}, "
            f"padding={padding!r}"
        )


def _whole_features(x):
    """Returns a tensor of which at most the batch is split."""
    x = tf.convert_to_tensor(x)
    mesh, axis = placement.current_mesh(), placement.batch_axis()
    return dtensor.relayout(x, placement.batch_layout(x.shape, mesh, axis))


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
    """Convolution of whole features.

    One of one dim, which DTensor does not know, or a dilated one, whose
    gradient TensorFlow's CPU kernels lack, is a sum over the positions of the
    window.
    """
    rank = len(input.shape) - 2
    dilations = _per_dim(dilations, rank)
    strides = _per_dim(strides, rank)
    if rank == 1 or max(dilations) > 1:
        _check_layout_of_images(
            "a convolution of 1 dim, or dilated,", data_format, padding
        )
        filters = tf.convert_to_tensor(filters)
        if filters.shape[-2] != input.shape[-1]:
            raise NotImplementedError(
                "Under a distribution, a convolution of 1 dim, or dilated, "
                f"cannot have groups. Received: dilations={dilations}, input "
                f"of {input.shape[-1]} channels, filters of shape "
                f"{tuple(filters.shape)}"
            )
        replicated = dtensor.Layout.replicated(
            placement.current_mesh(), len(filters.shape)
        )
        filters = dtensor.relayout(filters, replicated)
        return sum(
            tf.tensordot(image, filters[position], 1)
            for position, image in _windows(
                _whole_features(input),
                tuple(filters.shape[:rank]),
                strides,
                padding,
                dilations,
            )
        )
    return batch_parallel(
        original,
        input,
        filters,
        strides=strides,
        padding=padding,
        data_format=data_format,
    )


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
    """Mean or maximum over the positions of the window."""
    _check_layout_of_images("pooling", data_format, padding)
    x = tf.convert_to_tensor(input)
    rank = len(x.shape) - 2
    sizes = _per_dim(window_shape, rank)
    arguments = (
        sizes,
        _per_dim(strides, rank),
        padding,
        _per_dim(dilations, rank),
    )
    if pooling_type == "MAX":
        if padding.upper() == "SAME":
            return batch_parallel(
                original,
                x,
                window_shape,
                pooling_type,
                strides,
                padding,
                data_format,
                dilations,
            )
        images = [image for _, image in _windows(x, *arguments)]
        return functools.reduce(tf.maximum, images)
    ones = tf.ones([1, *x.shape[1:-1], 1], x.dtype)
    total = sum(image for _, image in _windows(x, *arguments))
    # Padding does not count.
    return total / sum(image for _, image in _windows(ones, *arguments))


def avg_pool(
    original,
    input,  # noqa: A002
    ksize,
    strides,
    padding,
    data_format=None,
    name=None,
):
    """DTensor has no gradient of a mean pooling."""
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
    """Adds up shifted images: DTensor has no depthwise convolution."""
    _check_layout_of_images("a depthwise convolution", data_format, padding)
    kernel = tf.convert_to_tensor(filter)
    total = sum(
        image[..., None] * kernel[position]
        for position, image in _windows(
            tf.convert_to_tensor(input),
            tuple(kernel.shape[:2]),
            _per_dim(strides, 2),
            padding,
            _per_dim(dilations, 2),
        )
    )
    channels = kernel.shape[2] * kernel.shape[3]
    return tf.reshape(total, [*total.shape[:3], channels])


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


RULES = [
    *(
        ("tensorflow:nn", name, _positional(names), _WHOLE)
        for name, names in {
            "conv2d": ("input", "filters"),
            "conv_transpose": ("input", "filters"),
            "max_pool": ("input",),
            "space_to_depth": ("input",),
            "depth_to_space": ("input",),
        }.items()
    ),
    ("tensorflow:nn", "convolution", convolution, _WHOLE),
    ("tensorflow:nn", "conv1d", conv1d, _WHOLE),
    ("tensorflow:nn", "pool", pool, "DTensor has no mean pooling to train"),
    (
        "tensorflow:nn",
        "avg_pool",
        avg_pool,
        "DTensor has no mean pooling to train",
    ),
    ("tensorflow:nn", "depthwise_conv2d", depthwise_conv2d, "DTensor has none"),
    ("tensorflow:nn", "separable_conv2d", separable_conv2d, "DTensor has none"),
]
