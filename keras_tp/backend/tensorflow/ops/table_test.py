"""Layers whose operations need a rule: the numbers of one device on a mesh."""

import os

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from tensorflow.experimental import dtensor

import keras_tp
from keras_tp import distribution as dist
from keras_tp.backend.tensorflow import placement

IMAGE = (6, 5, 8)
SEQUENCE = (6, 8)
VOLUME = (4, 5, 3, 4)

# Name: what comes in, and the layer. Its input is split over the model axis.
LAYERS = {
    "conv1d": (SEQUENCE, lambda: layers.Conv1D(8, 3)),
    "conv1d_causal": (
        SEQUENCE,
        lambda: layers.Conv1D(8, 3, padding="causal", dilation_rate=2),
    ),
    "conv2d": (IMAGE, lambda: layers.Conv2D(8, 3, strides=2, padding="same")),
    "conv2d_groups": (IMAGE, lambda: layers.Conv2D(8, 2, groups=4)),
    "conv2d_dilated": (
        IMAGE,
        lambda: layers.Conv2D(4, 2, dilation_rate=2, padding="same"),
    ),
    "conv3d": (VOLUME, lambda: layers.Conv3D(4, 2)),
    "conv1d_transpose": (SEQUENCE, lambda: layers.Conv1DTranspose(4, 3)),
    "conv2d_transpose": (
        IMAGE,
        lambda: layers.Conv2DTranspose(4, 3, strides=2),
    ),
    "depthwise_conv1d": (SEQUENCE, lambda: layers.DepthwiseConv1D(3)),
    "depthwise_conv2d": (
        IMAGE,
        lambda: layers.DepthwiseConv2D(
            3, strides=2, padding="same", depth_multiplier=2
        ),
    ),
    "separable_conv2d": (IMAGE, lambda: layers.SeparableConv2D(8, 3)),
    "max_pool1d": (SEQUENCE, lambda: layers.MaxPooling1D(2)),
    "max_pool2d": (IMAGE, lambda: layers.MaxPooling2D(2, padding="same")),
    "max_pool3d": (VOLUME, lambda: layers.MaxPooling3D(2)),
    "average_pool2d": (IMAGE, lambda: layers.AveragePooling2D((3, 2))),
    "average_pool1d": (
        SEQUENCE,
        lambda: layers.AveragePooling1D(4, 2, padding="same"),
    ),
    "adaptive_max_pool1d": (
        SEQUENCE,
        lambda: layers.AdaptiveMaxPooling1D(4),
    ),
    "global_max_pool2d": (IMAGE, lambda: layers.GlobalMaxPooling2D()),
    "global_average_pool2d": (
        IMAGE,
        lambda: layers.GlobalAveragePooling2D(),
    ),
    "adaptive_average_pool2d": (
        IMAGE,
        lambda: layers.AdaptiveAveragePooling2D((3, 2)),
    ),
    "up_sampling2d": (IMAGE, lambda: layers.UpSampling2D(2)),
    "zero_padding2d": (IMAGE, lambda: layers.ZeroPadding2D(1)),
    "cropping2d": (IMAGE, lambda: layers.Cropping2D(1)),
    "flatten": (IMAGE, lambda: layers.Flatten()),
    "permute": (IMAGE, lambda: layers.Permute((3, 1, 2))),
    "batch_normalization": (IMAGE, lambda: layers.BatchNormalization()),
    "group_normalization": (IMAGE, lambda: layers.GroupNormalization(4)),
    "layer_normalization": (IMAGE, lambda: layers.LayerNormalization()),
    "rms_normalization": (IMAGE, lambda: layers.RMSNormalization()),
    "unit_normalization": (IMAGE, lambda: layers.UnitNormalization()),
    "spectral_normalization": (
        SEQUENCE,
        lambda: layers.SpectralNormalization(layers.Dense(4)),
    ),
    "softmax": (SEQUENCE, lambda: layers.Softmax()),
    "prelu": (SEQUENCE, lambda: layers.PReLU()),
    "dropout": (SEQUENCE, lambda: layers.Dropout(0.4)),
    "dropout_of_rows": (
        SEQUENCE,
        lambda: layers.Dropout(0.4, noise_shape=(None, None, 1)),
    ),
    "spatial_dropout": (SEQUENCE, lambda: layers.SpatialDropout1D(0.4)),
    "alpha_dropout": (SEQUENCE, lambda: layers.AlphaDropout(0.4)),
    "gaussian_dropout": (SEQUENCE, lambda: layers.GaussianDropout(0.4)),
    "gaussian_noise": (SEQUENCE, lambda: layers.GaussianNoise(0.4)),
    "simple_rnn": (
        SEQUENCE,
        lambda: layers.SimpleRNN(8, return_sequences=True),
    ),
    "lstm": (SEQUENCE, lambda: layers.LSTM(8, go_backwards=True)),
    "gru": (SEQUENCE, lambda: layers.GRU(8, dropout=0.3)),
    "bidirectional": (
        SEQUENCE,
        lambda: layers.Bidirectional(layers.LSTM(4, return_sequences=True)),
    ),
    "time_distributed": (
        SEQUENCE,
        lambda: layers.TimeDistributed(layers.Dense(4)),
    ),
    "causal_attention": (
        SEQUENCE,
        lambda: SelfAttention(use_causal_mask=True),
    ),
    "reversed": (SEQUENCE, lambda: Function(lambda x: keras.ops.flip(x, 1))),
    "reversed_features": (
        SEQUENCE,
        lambda: Function(lambda x: keras.ops.flip(x, -1)),
    ),
    "rolled": (SEQUENCE, lambda: Function(lambda x: keras.ops.roll(x, 3, -1))),
    "split": (
        SEQUENCE,
        lambda: Function(
            lambda x: (
                keras.ops.split(x, [2, 6], -1)[1] * keras.ops.split(x, 2, -1)[1]
            )
        ),
    ),
    "unstacked": (
        SEQUENCE,
        lambda: Function(lambda x: sum(keras.ops.unstack(x, axis=-1))),
    ),
    "triangles": (
        SEQUENCE,
        lambda: Function(
            lambda x: keras.ops.tril(x, 1) + 2 * keras.ops.triu(x, -2)
        ),
    ),
    "diagonal": (
        SEQUENCE,
        lambda: Function(lambda x: keras.ops.diagonal(x, 0, 1, 2)),
    ),
    "sorted": (SEQUENCE, lambda: Function(lambda x: keras.ops.sort(x, -1))),
    "cumulated": (
        SEQUENCE,
        lambda: Function(lambda x: keras.ops.cumsum(x, -1)),
    ),
    "padded_features": (
        SEQUENCE,
        lambda: Function(lambda x: keras.ops.pad(x, [[0, 0], [1, 0], [2, 3]])),
    ),
    "padded_with_ones": (
        SEQUENCE,
        lambda: Function(
            lambda x: keras.ops.pad(
                x, [[0, 0], [0, 2], [0, 0]], constant_values=1
            )
        ),
    ),
    "padded_by_mirroring": (
        SEQUENCE,
        lambda: Function(
            lambda x: (
                keras.ops.pad(x, [[0, 0], [2, 0], [1, 3]], "reflect")
                * keras.ops.pad(x, [[0, 0], [2, 0], [1, 3]], "symmetric")
            )
        ),
    ),
    "samples_by_samples": (SEQUENCE, lambda: Function(by_samples)),
    "chosen_by_one_condition": (
        SEQUENCE,
        lambda: Function(
            lambda x: keras.ops.where(
                keras.ops.sum(x) > 0, x, keras.ops.where(True, 2 * x, x * x)
            )
        ),
    ),
    "made_when_built": (SEQUENCE, lambda: MadeWhenBuilt()),
    "row_of_a_weight": (SEQUENCE, lambda: RowOfWeight()),
    "one_hot": (
        SEQUENCE,
        lambda: Function(
            lambda x: keras.ops.one_hot(keras.ops.argmax(x, -1), 8) * x
        ),
    ),
}


class Function(layers.Layer):
    def __init__(self, function, **kwargs):
        super().__init__(**kwargs)
        self.function = function

    def call(self, x):
        return self.function(x)


def by_samples(x):
    flat = keras.ops.reshape(x, (-1, x.shape[1] * x.shape[2])) / 10
    logits = keras.ops.matmul(flat, keras.ops.transpose(flat))
    both = logits + 2 * keras.ops.transpose(logits)
    return x * keras.ops.mean(both, -1)[:, None, None]


class MadeWhenBuilt(layers.Layer):
    """Keeps a tensor that is no variable."""

    def build(self, shape):
        self.numbers = keras.ops.linspace(0.0, 1.0, 200)[:, None]

    def call(self, x):
        return x * keras.ops.mean(self.numbers, 0)


class RowOfWeight(layers.Layer):
    def build(self, shape):
        self.table = self.add_weight(
            (2, shape[-1]), name="table", initializer="random_normal"
        )

    def call(self, x):
        return x * self.table[1, None]


class SelfAttention(layers.Layer):
    def __init__(self, **arguments):
        super().__init__()
        self.inner = layers.MultiHeadAttention(2, 4)
        self.arguments = arguments

    def build(self, shape):
        self.inner.build(shape, shape)

    def call(self, x):
        return self.inner(x, x, **self.arguments)


def build(name):
    keras.utils.set_random_seed(1)
    shape, layer = LAYERS[name]
    return keras.Sequential(
        [
            keras.Input((*shape[:-1], 3)),
            layers.Dense(shape[-1], name="up"),
            layer(),
        ]
    )


def train(model):
    rng = np.random.default_rng(2)
    x = rng.normal(size=(4, *model.input_shape[1:])).astype("float32")
    y = rng.normal(size=(4, *model.output_shape[1:])).astype("float32")
    model.compile(keras.optimizers.SGD(0.1), "mse")
    losses = model.fit(x, y, batch_size=4, epochs=3, verbose=0).history["loss"]
    return losses, model.predict(x, verbose=0), model.get_weights()


def distribution(shape=(2, 2), extra=None):
    devices = dist.list_devices()[: shape[0] * shape[1]]
    layout_map = dist.LayoutMap(
        dist.DeviceMesh(shape, ["batch", "model"], devices)
    )
    layout_map[".*up/kernel"] = (None, "model")
    for pattern, axes in (extra or {}).items():
        layout_map[pattern] = axes
    return dist.ModelParallel(layout_map=layout_map)


# Whose operations others have too: `ops_layers_test.py` tries them all.
ONLY_SLOW = set(
    """adaptive_average_pool2d average_pool1d bidirectional conv1d conv1d_causal
    conv1d_transpose cropping2d depthwise_conv1d dropout_of_rows flatten
    gaussian_dropout gaussian_noise global_max_pool2d gru layer_normalization
    max_pool1d max_pool3d permute prelu rms_normalization separable_conv2d
    simple_rnn spatial_dropout time_distributed unit_normalization
    up_sampling2d zero_padding2d""".split()
)


@pytest.mark.parametrize(
    "name",
    [
        name
        for name in LAYERS
        if name not in ONLY_SLOW or os.environ.get("KERAS_TP_SLOW") == "1"
    ],
)
def test_a_layer_on_split_features(name):
    expected = train(build(name))
    with distribution().scope():
        model = build(name)
    got = train(model)
    assert dist.describe(model).rows[0].is_split
    for a, b in zip(keras.tree.flatten(got), keras.tree.flatten(expected)):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize(
    "make",
    [
        lambda: layers.LSTM(4, name="inner"),
        lambda: layers.TimeDistributed(layers.Dense(4, name="inner")),
    ],
    ids=["lstm", "time_distributed"],
)
def test_units_of_a_step_are_split(make):
    """DTensor cannot split a dim in a transpose, nor gather it."""

    def trained():
        keras.utils.set_random_seed(1)
        up = layers.Dense(8, name="up")
        model = keras.Sequential([keras.Input((2, 3)), up, make()])
        model.compile(keras.optimizers.SGD(0.1), "mse")
        rng = np.random.default_rng(2)
        x = rng.normal(size=(4, 2, 3)).astype("float32")
        y = rng.normal(size=(4, *model.output_shape[1:])).astype("float32")
        losses = [model.train_on_batch(x, y) for _ in range(2)]
        return model, [*losses, *model.get_weights()]

    _, expected = trained()
    extra = {".*inner.*kernel": (None, "model"), ".*bias": ("model",)}
    with distribution((1, 2), extra).scope():
        model, got = trained()
    for variable in model.trainable_variables:
        assert "model" in variable.value.layout.sharding_specs
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("kernel", ["kernel", "recurrent_kernel"])
@pytest.mark.parametrize(
    "layer",
    [
        lambda: layers.SimpleRNN(4, return_sequences=True),
        lambda: layers.LSTM(4),
        lambda: layers.RNN([layers.GRUCell(4), layers.GRUCell(4)]),
    ],
    ids=["simple_rnn", "lstm", "stacked_gru"],
)
def test_rows_of_a_cell_whose_input_is_whole(layer, kernel):
    def build():
        keras.utils.set_random_seed(1)
        return keras.Sequential([keras.Input((3, 4)), layer()])

    expected = train(build())
    extra = {f".*/{kernel}": ("model", None)}
    with distribution((1, 2), extra).scope():
        model = build()
    assert any(row.is_split for row in dist.describe(model).rows)
    got = train(model)
    for a, b in zip(keras.tree.flatten(got), keras.tree.flatten(expected)):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6)


def test_steps_with_a_mask():
    def make():
        keras.utils.set_random_seed(1)
        inner = layers.LSTM(4)
        return keras.Sequential(
            [
                keras.Input((3, 6)),
                layers.Embedding(9, 8, mask_zero=True),
                layers.TimeDistributed(inner),
            ]
        )

    x = np.array([[[1, 2, 3, 0, 0, 0], [4, 5, 0, 0, 0, 0], [6, 0, 0, 0, 0, 0]]])
    expected = make().predict(x, verbose=0)
    with distribution().scope():
        model = make()
    got = model.predict(np.repeat(x, 2, 0), verbose=0)
    np.testing.assert_allclose(got[1], expected[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("sequences", [False, True])
def test_a_mask_is_read_backwards(sequences):
    """Outputs of masked steps are zeros, and only those."""

    def make():
        keras.utils.set_random_seed(1)
        lstm = layers.LSTM(4, return_sequences=sequences)
        return keras.Sequential(
            [
                keras.Input((6,)),
                layers.Embedding(9, 8, mask_zero=True, name="up"),
                layers.Bidirectional(lstm),
            ]
        )

    x = np.array([[1, 2, 3, 0, 0, 0], [0, 5, 4, 3, 2, 1]])
    expected = make().predict(x, verbose=0)
    with distribution().scope():
        model = make()
    got = model.predict(x, verbose=0)
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("jit", [False, True])
def test_numbers_of_an_eager_call_are_on_the_mesh(jit):
    class Weighted(layers.Layer):
        def call(self, x):
            return x * keras.ops.convert_to_tensor([0.5, 2.0, 1.0, 3.0])

    with distribution().scope():
        model = keras.Sequential(
            [keras.Input((3,)), layers.Dense(4, name="up"), Weighted()]
        )
    x = np.ones((4, 3), "float32")
    call = tf.function(model) if jit else model
    found = np.asarray(call(x))
    expected = x @ model.get_weights()[0] * [0.5, 2, 1, 3]
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_a_rule_needs_no_mesh_and_leaves_other_tensors_alone():
    with distribution().scope():
        x = tf.reshape(tf.range(24.0), (4, 6))
        np.testing.assert_array_equal(tf.split(x, 2, 1)[1], x.numpy()[:, 3:])
        np.testing.assert_array_equal(
            tf.random.stateless_categorical(tf.ones((2, 3)), 4, (1, 2)).shape,
            (2, 4),
        )
    assert placement.current_mesh() is None


def test_random_numbers_without_a_rule_are_refused():
    class Noise(layers.Layer):
        def call(self, x):
            noise = keras.random.truncated_normal(keras.ops.shape(x), seed=1)
            return x + noise

    with distribution().scope():
        model = keras.Sequential(
            [keras.Input((6,)), layers.Dense(4, name="up"), Noise()]
        )
        with pytest.raises(NotImplementedError) as e:
            model.predict(np.ones((4, 6)), verbose=0)
    for text in ("stateless_truncated_normal", "data pipeline"):
        assert text in str(e.value)


def test_cells_are_not_handed_to_a_fused_kernel():
    """Whatever is asked of it: on a GPU it would be there."""
    mesh = dist.DeviceMesh((2,), ["model"], dist.list_devices()[:2])
    keras_tp.install()
    for name in ("lstm", "gru"):
        function = getattr(keras.src.backend, name)
        with pytest.raises(TypeError):
            function()
        with placement.on_mesh(mesh.backend_mesh):
            with pytest.raises(NotImplementedError):
                function()


@pytest.mark.parametrize(
    "function",
    {
        "scattered": lambda x: keras.ops.scatter(
            np.arange(0, 12, 2)[:, None], x, (12,)
        ),
        "diagonal": keras.ops.diag,
        "correlated": lambda x: keras.ops.correlate(x, x[:3], "same"),
        "filtered": lambda x: keras.ops.correlate(
            x, np.array([1, 2, 3], "float32"), "valid"
        ),
    }.items(),
    ids=lambda item: item[0],
)
def test_an_operation_on_a_split_vector(function):
    value = np.arange(6, dtype="float32")
    _, function = function
    expected = np.asarray(function(value))
    mesh = dist.DeviceMesh((2,), ["model"], dist.list_devices()[:2])
    mesh = mesh.backend_mesh
    keras_tp.install()
    placed = placement.place(value, dtensor.Layout(["model"], mesh))
    with placement.on_mesh(mesh):
        found = tf.function(function)(placed)
    np.testing.assert_array_equal(placement.read(found), expected)


@pytest.mark.parametrize("axis", [None, 0, (0, 2), -1])
def test_squeezed_dims(axis):
    value = np.arange(6, dtype="float32").reshape(1, 6, 1)
    if axis == -1:
        value = value.reshape(6, 1)
    expected = np.squeeze(value, axis)
    mesh = dist.DeviceMesh((2,), ["model"], dist.list_devices()[:2])
    mesh = mesh.backend_mesh
    specs = ["model" if size > 1 else "unsharded" for size in value.shape]
    keras_tp.install()
    placed = placement.place(value, dtensor.Layout(specs, mesh))
    with placement.on_mesh(mesh):
        found = tf.function(lambda x: keras.ops.squeeze(x, axis))(placed)
    assert "model" in dtensor.fetch_layout(found).sharding_specs
    np.testing.assert_array_equal(placement.read(found), expected)
