"""Operations that DTensor cannot run, or not correctly, as TensorFlow has them.

Each rule replaces a public function of TensorFlow (so that it holds for Keras,
KerasHub and a user's own code alike) or of Keras's backend, and only on a mesh.
"""

import functools
import itertools

import tensorflow as tf
from tensorflow.experimental import dtensor

from keras_tp.backend.hooks import Hook
from keras_tp.backend.tensorflow import philox
from keras_tp.backend.tensorflow import placement


def _on_mesh(rule):
    """Returns a hook: the rule on a mesh, the original elsewhere."""

    def hook(original):
        @functools.wraps(original)
        def function(*args, **kwargs):
            if placement.current_mesh() is not None:
                return rule(original, *args, **kwargs)
            for x in args:
                if placement.is_dtensor(x):
                    with placement.on_mesh(dtensor.fetch_layout(x).mesh):
                        return rule(original, *args, **kwargs)
            return original(*args, **kwargs)

        return function

    return hook


def _is_tensor(x):
    return tf.is_tensor(x) or isinstance(x, tf.Variable)


def _static(value, what):
    """Returns a shape as ints; `ValueError` if it is not known."""
    found = tf.get_static_value(value)
    if found is None and isinstance(value, (list, tuple)):
        found = [tf.get_static_value(size) for size in value]
        found = None if None in found else found
    if found is None:
        raise ValueError(
            f"Under a distribution, {what} needs a shape that is known when "
            "the step is traced. Give the dims as ints, or take them from "
            f"`x.shape`. Received: shape={value}"
        )
    return tuple(int(size) for size in found)


def _slice(x, axis, start, stop):
    index = [slice(None)] * len(x.shape)
    index[axis] = slice(start, stop)
    return x[tuple(index)]


# --- storage is split, the computation is not -------------------------------


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


# --- composed of operations that DTensor splits -----------------------------


def split(original, value, num_or_size_splits, axis=0, num=None, name=None):
    """Slices: DTensor cannot split a dim that lies on several devices."""
    value = tf.convert_to_tensor(value)
    size = value.shape[axis]
    sizes = num_or_size_splits
    if isinstance(sizes, int) and size is not None:
        if size % sizes:
            return original(value, sizes, axis)
        sizes = [size // sizes] * sizes
    sizes = tf.get_static_value(tf.convert_to_tensor(sizes))
    if size is None or sizes is None:
        return original(value, num_or_size_splits, axis, num, name)
    known = sum(int(s) for s in sizes if s >= 0)
    sizes = [int(s) if s >= 0 else size - known for s in sizes]
    parts, start = [], 0
    for s in sizes:
        stop = start + s
        parts.append(_slice(value, axis % len(value.shape), start, stop))
        start = stop
    return parts


def unstack(original, value, num=None, axis=0, name="unstack"):
    """Slices: DTensor cannot unstack a dim that lies on several devices."""
    value = tf.convert_to_tensor(value)
    size = value.shape[axis]
    if size is None:
        return original(value, num, axis, name)
    axis %= len(value.shape)
    return [
        tf.squeeze(_slice(value, axis, i, i + 1), axis) for i in range(size)
    ]


def reverse(original, tensor, axis, name=None):
    """Gathers the indices from the last to the first."""
    tensor = tf.convert_to_tensor(tensor)
    axes = tf.get_static_value(tf.convert_to_tensor(axis))
    for dim in axes.reshape([-1]):
        size = tensor.shape[int(dim)]
        if size is None:
            return original(tensor, axis, name)
        tensor = tf.gather(tensor, tf.range(size - 1, -1, -1), axis=int(dim))
    return tensor


def roll(original, input, shift, axis, name=None):  # noqa: A002
    """Joins the end and the beginning."""
    input = tf.convert_to_tensor(input)  # noqa: A001
    shifts = tf.get_static_value(tf.convert_to_tensor(shift))
    axes = tf.get_static_value(tf.convert_to_tensor(axis))
    if shifts is None or axes is None:
        return original(input, shift, axis, name)
    for by, dim in zip(shifts.reshape([-1]), axes.reshape([-1])):
        dim = int(dim) % len(input.shape)
        size = input.shape[dim]
        by = int(by) % size
        if by:
            input = tf.concat(  # noqa: A001
                [
                    _slice(input, dim, size - by, size),
                    _slice(input, dim, 0, size - by),
                ],
                dim,
            )
    return input


def band_part(original, input, num_lower, num_upper, name=None):  # noqa: A002
    """Keeps what a comparison of row and column indices selects."""
    input = tf.convert_to_tensor(input)  # noqa: A001
    rows, columns = input.shape[-2:]
    below = tf.range(rows)[:, None] - tf.range(columns)[None, :]
    lower = tf.cast(num_lower, tf.int32)
    upper = tf.cast(num_upper, tf.int32)
    kept = tf.logical_and(
        tf.logical_or(lower < 0, below <= lower),
        tf.logical_or(upper < 0, -below <= upper),
    )
    return tf.where(kept, input, tf.zeros([], input.dtype))


def diag_part(original, input, *args, **kwargs):  # noqa: A002
    """Sums each row of what is zero off the diagonal."""
    if args or {k: v for k, v in kwargs.items() if k != "name" and v != 0}:
        raise ValueError(
            "Under a distribution, `tf.linalg.diag_part` takes the main "
            f"diagonal only. Received: {args} {kwargs}"
        )
    input = tf.convert_to_tensor(input)  # noqa: A001
    rows, columns = input.shape[-2:]
    size = min(rows, columns)
    input = input[..., :size, :size]  # noqa: A001
    kept = tf.range(size)[:, None] == tf.range(size)[None, :]
    return tf.reduce_sum(tf.where(kept, input, tf.zeros([], input.dtype)), -1)


def diag(original, diagonal, *args, **kwargs):
    """Keeps the diagonal of the values spread over columns."""
    if args or {k: v for k, v in kwargs.items() if k != "name" and v != 0}:
        raise ValueError(
            "Under a distribution, `tf.linalg.diag` makes the main diagonal "
            f"only. Received: {args} {kwargs}"
        )
    diagonal = tf.convert_to_tensor(diagonal)
    size = diagonal.shape[-1]
    kept = tf.range(size)[:, None] == tf.range(size)[None, :]
    return tf.where(kept, diagonal[..., None], tf.zeros([], diagonal.dtype))


def one_hot(
    original,
    indices,
    depth,
    on_value=None,
    off_value=None,
    axis=None,
    dtype=None,
    name=None,
):
    """Compares indices that may be split with all numbers."""
    indices = tf.convert_to_tensor(indices)
    on = tf.convert_to_tensor(1 if on_value is None else on_value)
    off = tf.convert_to_tensor(0 if off_value is None else off_value)
    if dtype is None:
        dtype = tf.float32 if on_value is None else on.dtype
    axis = len(indices.shape) if axis in (None, -1) else axis
    shape = [1] * (len(indices.shape) + 1)
    shape[axis] = -1
    numbers = tf.reshape(tf.range(tf.cast(depth, indices.dtype)), shape)
    return tf.where(
        tf.expand_dims(indices, axis) == numbers,
        tf.cast(on, dtype),
        tf.cast(off, dtype),
    )


def scatter_nd(original, indices, updates, shape, name=None):
    """DTensor's expansion makes shapes of int32, whatever the indices are."""
    indices = tf.cast(indices, tf.int32)
    return original(indices, updates, tf.cast(shape, tf.int32), name)


# --- random numbers ---------------------------------------------------------


def stateless_uniform(
    original,
    shape,
    seed,
    minval=0,
    maxval=None,
    dtype=tf.float32,
    name=None,
    alg="auto_select",
):
    """The numbers of one device, whatever the mesh."""
    shape = _static(shape, "a random tensor")
    dtype = tf.as_dtype(dtype)
    if dtype == tf.int32 and maxval is not None:
        return philox.integers(shape, seed, minval, maxval)
    if not philox.supports(dtype):
        _refuse_random(f"uniform numbers of dtype {dtype.name}")
    maxval = 1 if maxval is None else maxval
    minval, maxval = tf.cast(minval, dtype), tf.cast(maxval, dtype)
    return philox.uniform(shape, seed, dtype) * (maxval - minval) + minval


def stateless_normal(
    original,
    shape,
    seed,
    mean=0.0,
    stddev=1.0,
    dtype=tf.float32,
    name=None,
    alg="auto_select",
):
    """The numbers of one device, whatever the mesh."""
    dtype = tf.as_dtype(dtype)
    if dtype != tf.float32:
        _refuse_random(f"normal numbers of dtype {dtype.name}")
    shape = _static(shape, "a random tensor")
    numbers = philox.normal(shape, seed, dtype)
    return numbers * tf.cast(stddev, dtype) + tf.cast(mean, dtype)


def stateless_dropout(
    original,
    x,
    rate,
    seed,
    rng_alg="auto_select",
    noise_shape=None,
    name=None,
):
    """Masks of `stateless_uniform`, applied as TensorFlow does."""
    x = tf.convert_to_tensor(x)
    shape = tf.shape(x) if noise_shape is None else noise_shape
    numbers = stateless_uniform(
        None, _static(shape, "dropout"), seed, dtype=x.dtype
    )
    kept = numbers >= tf.cast(rate, x.dtype)
    scaled = x * tf.cast(1 / (1 - rate), x.dtype)
    return tf.where(kept, scaled, tf.zeros([], x.dtype))


def _refuse_random(what):
    raise NotImplementedError(
        f"keras_tp has no rule for {what} under a distribution on TensorFlow: "
        "DTensor's own would depend on the devices. Draw them in the data "
        "pipeline and pass them to the model as an input, or use uniform "
        "or normal numbers of float32."
    )


def _refused(name):
    def rule(original, *args, **kwargs):
        _refuse_random(f"`tf.random.{name}`")

    return rule


# --- recurrent layers -------------------------------------------------------


def rnn(original, *args, **kwargs):
    """Unrolled: DTensor has no expansion of the lists that a loop keeps."""
    names = ("step_function", "inputs", "initial_states", "go_backwards")
    names += ("mask", "constants", "unroll")
    kwargs.update(zip(names, args))
    kwargs["unroll"] = True
    return original(**kwargs)


def decline(original, *args, **kwargs):
    """The layer then computes step by step."""
    raise NotImplementedError


_RNN = "keras.src.backend.tensorflow.rnn"
_KERAS = ("keras.src.backend.tensorflow", "keras.src.backend")
_WHOLE = "whole features: DTensor cannot split the channels of a convolution"
_MASKS = "random numbers are those of one device on every mesh"

_RULES = [
    ("tensorflow", "split", split, "DTensor cannot split a split dim"),
    ("tensorflow", "unstack", unstack, "DTensor cannot unstack a split dim"),
    ("tensorflow", "reverse", reverse, "DTensor has no ReverseV2"),
    ("tensorflow", "roll", roll, "DTensor has no Roll"),
    ("tensorflow", "scatter_nd", scatter_nd, "DTensor wants int32 indices"),
    ("tensorflow:linalg", "band_part", band_part, "DTensor has none"),
    ("tensorflow:linalg", "diag_part", diag_part, "DTensor has none"),
    ("tensorflow:linalg", "diag", diag, "DTensor has none"),
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
    ("tensorflow", "one_hot", one_hot, "DTensor wants whole indices"),
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
    (
        "tensorflow.nn.experimental",
        "stateless_dropout",
        stateless_dropout,
        _MASKS,
    ),
    *(
        ("tensorflow:random", name, rule, _MASKS)
        for name, rule in {
            "stateless_uniform": stateless_uniform,
            "stateless_normal": stateless_normal,
            "stateless_truncated_normal": _refused(
                "stateless_truncated_normal"
            ),
            "stateless_categorical": _refused("stateless_categorical"),
            "stateless_gamma": _refused("stateless_gamma"),
            "stateless_binomial": _refused("stateless_binomial"),
        }.items()
    ),
    *(
        (owner, "rnn", rnn, "recurrent layers are unrolled")
        for owner in (_RNN, *_KERAS)
    ),
    *(
        (owner, name, decline, "the cells compute, not a fused kernel")
        for name in ("lstm", "gru")
        for owner in (_RNN, *_KERAS)
    ),
]

TABLE = [
    Hook(owner, name, _on_mesh(rule), why) for owner, name, rule, why in _RULES
]
