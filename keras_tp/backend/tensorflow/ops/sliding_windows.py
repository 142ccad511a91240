"""Sliding windows over images, built from operations that DTensor splits.

DTensor's own convolutions need whole channels. Here a convolution contracts
shifted views of the image with the kernel, over the positions in the window and
the input channels. Both gradients are contractions too. A kernel split over its
output channels (column-parallel) or input channels (row-parallel) then costs
the same as in a dense layer: one all-reduce of an image, backward or forward.

An image is a tensor of shape `(batch, *spatial, channels)`.
"""

import collections
import itertools

import tensorflow as tf

_DIMS = "xyz"


class Window(
    collections.namedtuple("Window", ["sizes", "strides", "dilations", "pads"])
):
    """A window that slides over images, with one entry for each spatial dim.

    `pads` has pairs, the padding before and after.
    """

    @property
    def spans(self):
        """The sizes, including the gaps of the dilations."""
        return [(n - 1) * by + 1 for n, by in zip(self.sizes, self.dilations)]


def window(image, sizes, strides, padding, dilations):
    """Returns a `Window` for images of the spatial size `image`.

    Sizes, strides and dilations are as TensorFlow accepts them.
    """
    rank = len(image)
    unpadded = Window(
        *(per_dim(value, rank) for value in (sizes, strides, dilations)),
        ((0, 0),) * rank,
    )
    if padding.upper() == "VALID":
        return unpadded
    pads = []
    for n, span, step in zip(image, unpadded.spans, unpadded.strides):
        missing = max((-(-n // step) - 1) * step + span - n, 0)
        pads.append((missing // 2, missing - missing // 2))
    return unpadded._replace(pads=tuple(pads))


def per_dim(value, rank):
    """Returns a size, stride or dilation as one int for each spatial dim."""
    if value is None:
        return (1,) * rank
    if isinstance(value, int):
        return (value,) * rank
    value = tuple(int(v) for v in value)
    if len(value) == 1:
        return value * rank
    return value[1:-1] if len(value) == rank + 2 else value


def views(x, window, outside=0):
    """Returns a list of views of an image, one per position in the window.

    The number `outside` pads the image.
    """
    if any(map(any, window.pads)):
        pads = [(0, 0), *window.pads, (0, 0)]
        x = tf.pad(x, pads, constant_values=tf.cast(outside, x.dtype))
    lengths = [
        (n - span) // step * step + 1
        for n, span, step in zip(x.shape[1:], window.spans, window.strides)
    ]
    seen = []
    for position in itertools.product(*map(range, window.sizes)):
        index = [
            slice(i * by, i * by + length, step)
            for i, by, length, step in zip(
                position, window.dilations, lengths, window.strides
            )
        ]
        seen.append(x[(slice(None), *index)])
    return seen


def _side_by_side(images):
    """Stacks images along a new dim before the channels."""
    # DTensor's expansion of `tf.stack` gathers every dim.
    return tf.concat([tf.expand_dims(image, -2) for image in images], -2)


def _product(equation, *inputs):
    """Like `tf.einsum`, for inputs whose contracted dims are split alike."""
    return tf.raw_ops.Einsum(inputs=inputs, equation=equation)


def _flat(kernel):
    """Returns a kernel with its spatial dims merged into one."""
    return tf.reshape(kernel, [-1, *kernel.shape[-2:]])


def correlate(x, kernel, window):
    """Returns the convolution of an image.

    The kernel has shape `(*sizes, channels of x, output channels)`.
    """
    dims = _DIMS[: len(window.sizes)]
    seen = _side_by_side(views(x, window))
    return _product(f"b{dims}pi,pio->b{dims}o", seen, _flat(kernel))


def spread(y, kernel, window, image):
    """Returns the transposed convolution: the gradient of `correlate`'s image.

    `image` is the spatial size of the result.
    """
    rank = len(image)
    sizes = [n + span - 1 for n, span in zip(image, window.spans)]
    first = [
        span - 1 - pads[0] for span, pads in zip(window.spans, window.pads)
    ]
    ends = [
        start + (n - 1) * step + 1
        for start, n, step in zip(first, y.shape[1:], window.strides)
    ]
    # Pixels a stride apart, with zeros between and around them: the gradient of
    # the strided slice that selects these pixels.
    apart = tf.raw_ops.StridedSliceGrad(
        shape=[y.shape[0], *sizes, y.shape[-1]],
        begin=[0, *first, 0],
        end=[y.shape[0], *ends, y.shape[-1]],
        strides=[1, *window.strides, 1],
        dy=y,
    )
    one_by_one = window._replace(strides=(1,) * rank, pads=((0, 0),) * rank)
    seen = _side_by_side(views(apart, one_by_one)[::-1])
    dims = _DIMS[:rank]
    # Contract positions and channels at once: devices all-reduce one image.
    return _product(f"b{dims}po,pio->b{dims}i", seen, _flat(kernel))


def kernel_gradient(x, dy, window):
    """Returns the gradient of `correlate`'s kernel."""
    dims = _DIMS[: len(window.sizes)]
    seen = _side_by_side(views(x, window))
    gradient = _product(f"b{dims}pi,b{dims}o->pio", seen, dy)
    return tf.reshape(gradient, [*window.sizes, *gradient.shape[1:]])
