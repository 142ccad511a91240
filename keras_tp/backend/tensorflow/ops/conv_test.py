"""Convolutions whose kernels are split: numbers, and what is communicated."""

import math

import keras
import numpy as np
import pytest
from keras import layers

from keras_tp import distribution as dist

BATCH = 4
CHANNELS = 8
SEQUENCE = (9,)
IMAGE = (7, 6)
VOLUME = (4, 5, 3)

# Name: size of the images, the layer, and its kernel's name, whose last two
# dims are the input and the output channels.
LAYERS = {
    "conv1d": (SEQUENCE, lambda: layers.Conv1D(12, 3), "kernel"),
    "conv1d_dilated": (
        SEQUENCE,
        lambda: layers.Conv1D(12, 3, dilation_rate=2),
        "kernel",
    ),
    "conv2d": (IMAGE, lambda: layers.Conv2D(12, (3, 2)), "kernel"),
    "conv2d_strides": (
        IMAGE,
        lambda: layers.Conv2D(12, 3, strides=(2, 3), padding="same"),
        "kernel",
    ),
    "conv2d_dilated": (
        IMAGE,
        lambda: layers.Conv2D(12, 2, dilation_rate=2, padding="same"),
        "kernel",
    ),
    "conv3d": (VOLUME, lambda: layers.Conv3D(12, 2, strides=2), "kernel"),
    "separable_conv1d": (
        SEQUENCE,
        lambda: layers.SeparableConv1D(12, 3, padding="same"),
        "pointwise_kernel",
    ),
    "separable_conv2d": (
        IMAGE,
        lambda: layers.SeparableConv2D(12, 3, padding="same"),
        "pointwise_kernel",
    ),
}
# Here the last two dims are the output and the input channels.
TRANSPOSED = {
    "conv1d_transpose": (
        SEQUENCE,
        lambda: layers.Conv1DTranspose(12, 3, strides=2, padding="same"),
    ),
    "conv2d_transpose": (
        IMAGE,
        lambda: layers.Conv2DTranspose(12, (3, 2), strides=2),
    ),
    "conv3d_transpose": (VOLUME, lambda: layers.Conv3DTranspose(12, 2)),
}


def build(size, layer):
    """A convolution behind a layer, so that its input needs a gradient."""
    keras.utils.set_random_seed(1)
    convolution = layer()
    convolution.name = "convolution"
    return keras.Sequential(
        [
            keras.Input((*size, 3)),
            layers.Dense(CHANNELS, name="first"),
            convolution,
        ],
        name="images",
    )


def data(model):
    rng = np.random.default_rng(2)
    x = rng.normal(size=(BATCH, *model.input_shape[1:])).astype("float32")
    y = rng.normal(size=(BATCH, *model.output_shape[1:])).astype("float32")
    return x, y


def train(model):
    model.compile(keras.optimizers.SGD(0.1), "mse")
    x, y = data(model)
    losses = model.fit(
        x, y, batch_size=BATCH, epochs=3, shuffle=False, verbose=0
    ).history["loss"]
    return [losses, model.predict(x, verbose=0), *model.get_weights()]


def model_parallel(patterns, shape=(1, 4)):
    devices = dist.list_devices()[: math.prod(shape)]
    layout_map = dist.LayoutMap(
        dist.DeviceMesh(shape, ["batch", "model"], devices)
    )
    for pattern, axes in patterns.items():
        layout_map[pattern] = axes
    return dist.ModelParallel(layout_map=layout_map)


def check(size, layer, patterns, column):
    """Trains on one device and on a mesh, and counts what is communicated."""
    expected = train(build(size, layer))
    with model_parallel(patterns).scope():
        model = build(size, layer)
    for actual, wanted in zip(train(model), expected, strict=True):
        np.testing.assert_allclose(actual, wanted, rtol=2e-5, atol=2e-6)
    split = [row for row in dist.describe(model).rows if row.is_split]
    assert len(split) == len(patterns)
    assert [row.why for row in split] == [""] * len(split)
    counts = dist.count_collectives(model, *data(model))
    found = {name: pair for name, pair in counts.items() if pair[0]}
    output = model.output_shape[1:]
    if column:
        # The gradient of the image that went in; and the loss, which is a
        # mean over channels first.
        summed = [(*size, CHANNELS), output[:-1]]
    else:
        summed = [output]
    floats = sum(BATCH * math.prod(image) for image in summed)
    assert found == {"all_reduce": (len(summed), 4 * floats)}


def column_and_row(size, kernel, transposed=False):
    positions = (None,) * len(size)
    outputs, inputs = (None, "model"), ("model", None)
    if transposed:
        outputs, inputs = inputs, outputs
    path = f".*convolution/{kernel}"
    column = {path: (*positions, *outputs), ".*convolution/bias": ("model",)}
    row = {path: (*positions, *inputs)}
    # What comes in is split already.
    row.update({".*first/kernel": (None, "model"), ".*first/bias": ("model",)})
    return column, row


@pytest.mark.parametrize("name", LAYERS)
def test_split_kernels(name):
    size, layer, kernel = LAYERS[name]
    column, row = column_and_row(size, kernel)
    if kernel == "pointwise_kernel":
        # Or its gradient, computed for the channels of each device, is
        # gathered.
        depthwise = (*(None,) * len(size), "model", None)
        row[".*convolution/depthwise_kernel"] = depthwise
    check(size, layer, column, column=True)
    check(size, layer, row, column=False)


@pytest.mark.parametrize("name", TRANSPOSED)
def test_split_kernels_of_transposed_convolutions(name):
    size, layer = TRANSPOSED[name]
    column, row = column_and_row(size, "kernel", transposed=True)
    check(size, layer, column, column=True)
    check(size, layer, row, column=False)


@pytest.mark.parametrize(
    "size, layer",
    [
        (SEQUENCE, lambda: layers.Conv1D(12, 3, groups=2)),
        (SEQUENCE, lambda: layers.Conv1D(12, 2, dilation_rate=2, groups=4)),
        (IMAGE, lambda: layers.Conv2D(12, 2, dilation_rate=2, groups=2)),
        (VOLUME, lambda: layers.Conv3D(12, 2, groups=2)),
    ],
)
def test_groups_between_split_channels(size, layer):
    expected = train(build(size, layer))
    positions = (None,) * len(size)
    patterns = {
        ".*first/kernel": (None, "model"),
        ".*convolution/kernel": (*positions, None, "model"),
        ".*convolution/bias": ("model",),
    }
    with model_parallel(patterns).scope():
        model = build(size, layer)
    for actual, wanted in zip(train(model), expected, strict=True):
        np.testing.assert_allclose(actual, wanted, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("layer", [layers.Conv2D, layers.Conv2DTranspose])
def test_rows_of_an_image_that_is_whole(layer):
    """Each device takes its channels; the gradient is put together."""

    def convolution():
        return layer(4, 3, padding="same", activation="relu")

    axes = ("model", None) if layer is layers.Conv2D else (None, "model")
    expected = train(build(IMAGE, convolution))
    with model_parallel({".*convolution/kernel": (None, None, *axes)}).scope():
        model = build(IMAGE, convolution)
    for actual, wanted in zip(train(model), expected, strict=True):
        np.testing.assert_allclose(actual, wanted, rtol=2e-5, atol=2e-6)
    counts = dist.count_collectives(model, *data(model))
    assert counts["all_reduce"][0] == 1


def pair():
    keras.utils.set_random_seed(1)
    return keras.Sequential(
        [
            keras.Input((*IMAGE, 3)),
            layers.Conv2D(8, 2, activation="relu", name="up"),
            layers.BatchNormalization(name="norm"),
            layers.MaxPooling2D(2, padding="same"),
            layers.DepthwiseConv2D(2, name="each"),
            layers.AveragePooling2D(2, strides=1),
            layers.Conv2D(5, 1, name="down"),
        ],
        name="images",
    )


@pytest.mark.parametrize(
    "shape", [(1, 2), (1, 4), (2, 2)], ids=["1x2", "1x4", "2x2"]
)
def test_channels_stay_split_from_column_to_row(shape):
    distribution = model_parallel(
        {
            ".*up/kernel": (None, None, None, "model"),
            ".*up/bias": ("model",),
            ".*norm/(gamma|beta|moving_mean|moving_variance)": ("model",),
            ".*each/kernel": (None, None, "model", None),
            ".*each/bias": ("model",),
            ".*down/kernel": (None, None, "model", None),
        },
        shape,
    )
    expected = train(pair())
    with distribution.scope():
        model = pair()
    for actual, wanted in zip(train(model), expected, strict=True):
        np.testing.assert_allclose(actual, wanted, rtol=2e-5, atol=2e-6)
    counts = dist.count_collectives(model, *data(model))
    assert counts["all_gather"] == (0, 0)
    assert counts["all_to_all"] == (0, 0)
    if shape[0] == 1:
        output = BATCH * math.prod(model.output_shape[1:]) * 4
        assert counts["all_reduce"] == (1, output)


def excited():
    """Channels scaled by what a small network makes of their means."""
    keras.utils.set_random_seed(1)
    inputs = keras.Input((*IMAGE, 3))
    x = layers.Conv2D(8, 1, activation="relu", name="up")(inputs)
    means = layers.GlobalAveragePooling2D(keepdims=True)(x)
    means = layers.Conv2D(4, 1, activation="relu", name="reduce")(means)
    means = layers.Conv2D(8, 1, activation="sigmoid", name="expand")(means)
    x = layers.multiply([x, means])
    x = layers.Conv2D(5, 1, name="down")(x)
    return keras.Model(inputs, x, name="excited")


def test_the_gradient_of_means_that_are_whole():
    distribution = model_parallel(
        {
            ".*(up|reduce)/kernel": (None, None, None, "model"),
            ".*(up|reduce)/bias": ("model",),
            ".*(down|expand)/kernel": (None, None, "model", None),
        },
        (1, 2),
    )
    expected = train(excited())
    with distribution.scope():
        model = excited()
    for actual, wanted in zip(train(model), expected, strict=True):
        np.testing.assert_allclose(actual, wanted, rtol=2e-5, atol=2e-6)


GATHERED = {
    "groups": (
        IMAGE,
        lambda: layers.Conv2D(8, 2, groups=2),
        (None, None, None, "model"),
    ),
    "positions": (
        IMAGE,
        lambda: layers.Conv2D(8, (2, 3)),
        ("model", None, None, None),
    ),
    "long": (
        (80,),
        lambda: layers.Conv1D(8, 65, strides=2),
        (None, None, "model"),
    ),
}


@pytest.mark.parametrize("name", GATHERED)
def test_what_is_computed_whole_is_reported(name):
    size, layer, axes = GATHERED[name]
    expected = train(build(size, layer))
    with model_parallel({".*convolution/kernel": axes}, (1, 2)).scope():
        model = build(size, layer)
    for actual, wanted in zip(train(model), expected, strict=True):
        np.testing.assert_allclose(actual, wanted, rtol=2e-5, atol=2e-6)
    row = dist.describe(model)["images/convolution/kernel"]
    assert row.is_split
    assert "computed whole" in row.why
    counts = dist.count_collectives(model, *data(model))
    assert counts["all_gather"][0] > 0


# Name: size of the images, the layer, and whether its kernel is gathered.
CHANNELS_FIRST = {
    "conv1d": (SEQUENCE, layers.Conv1D, {}, False),
    "conv2d": (IMAGE, layers.Conv2D, {}, True),
    "conv2d_dilated": (IMAGE, layers.Conv2D, {"dilation_rate": 2}, False),
    "conv3d": (VOLUME, layers.Conv3D, {}, False),
}


@pytest.mark.parametrize("name", CHANNELS_FIRST)
def test_channels_first_kernels_are_reported_as_they_are_computed(name):
    size, layer, arguments, is_gathered = CHANNELS_FIRST[name]

    def build(shape, data_format):
        keras.utils.set_random_seed(1)
        convolution = layer(
            12, 2, data_format=data_format, name="convolution", **arguments
        )
        stack = [keras.Input(shape), convolution]
        return keras.Sequential(stack, name="images")

    x = np.random.default_rng(2).normal(size=(BATCH, *size, 3)).astype("f")
    expected = build((*size, 3), "channels_last").predict(x, verbose=0)
    axes = (*(None,) * len(size), None, "model")
    with model_parallel({".*convolution/kernel": axes}).scope():
        model = build((3, *size), "channels_first")
    x = np.moveaxis(x, -1, 1)
    found = np.moveaxis(model.predict(x, verbose=0), 1, -1)
    np.testing.assert_allclose(found, expected, rtol=2e-5, atol=2e-6)
    why = dist.describe(model)["images/convolution/kernel"].why
    assert ("computed whole" in why) == is_gathered
    gathers = dist.count_collectives(model, x)["all_gather"]
    assert (gathers[0] > 0) == is_gathered


def _concatenated(before, after):
    return layers.Concatenate()([before, after])


def _added(before, after):
    return layers.Add()([before, after])


# Split dims of the kernels of `first` and `second`; that of `last` is whole.
@pytest.mark.parametrize(
    "join,first,second", [(_concatenated, 3, 3), (_added, None, 2)]
)
@pytest.mark.parametrize("rank", [1, 2, 3])
def test_a_whole_kernel_between_others(rank, join, first, second):
    """DTensor gave the gradient of its input a layout that it refused."""
    mesh = dist.DeviceMesh((1, 2), ["batch", "model"], dist.list_devices()[:2])
    conv = getattr(layers, f"Conv{rank}D")
    size = (6,) * rank
    x = np.random.default_rng(0).normal(size=(2, *size, 4)).astype("float32")

    def losses():
        keras.utils.set_random_seed(3)
        inputs = keras.Input(x.shape[1:])
        before = layers.ReLU()(conv(4, 3, padding="same", name="first")(inputs))
        after = conv(4, 3, padding="same", name="second")(before)
        last = conv(4, 3, padding="same", name="last")
        model = keras.Model(inputs, last(join(before, after)))
        model.compile("sgd", "mse")
        return [model.train_on_batch(x, x) for _ in range(3)]

    expected = losses()
    layout_map = dist.LayoutMap(mesh)
    for name, dim in (("first", first), ("second", second)):
        if dim is not None:
            axes = [None] * (rank + 2)
            axes[dim - 2 + rank] = "model"
            layout_map[f"{name}/kernel"] = tuple(axes)
    with dist.ModelParallel(layout_map=layout_map).scope():
        found = losses()
    np.testing.assert_allclose(found, expected, rtol=1e-5)
