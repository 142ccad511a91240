"""More programs, after the examples of keras.io; see `recipes`."""

import keras
import numpy as np
from keras import layers
from keras import ops

from integration_tests.recipes import BACKEND
from integration_tests.recipes import _fit
from integration_tests.recipes import _flat
from integration_tests.recipes import _integers
from integration_tests.recipes import _numbers


def _trained(model, x, y, loss="mse", optimizer=None, **kwargs):
    model.compile(optimizer or keras.optimizers.SGD(0.05), loss, **kwargs)
    return _fit(model, x, y) + _flat(model.predict(x, verbose=0))[:8]


class GAN(keras.Model):
    """Two networks and two optimizers, in a train step of one's own.

    Keras's example has none for JAX.
    """

    def __init__(self):
        super().__init__()
        self.discriminator = keras.Sequential(
            [
                keras.Input((6, 6, 1)),
                layers.Conv2D(8, 3, strides=2, padding="same"),
                layers.LeakyReLU(negative_slope=0.2),
                layers.GlobalMaxPooling2D(),
                layers.Dense(1),
            ]
        )
        self.generator = keras.Sequential(
            [
                keras.Input((4,)),
                layers.Dense(9 * 4),
                layers.LeakyReLU(negative_slope=0.2),
                layers.Reshape((3, 3, 4)),
                layers.Conv2DTranspose(8, 4, strides=2, padding="same"),
                layers.Conv2D(1, 3, padding="same", activation="sigmoid"),
            ]
        )
        self.loss_fn = keras.losses.BinaryCrossentropy(from_logits=True)
        self.d_loss = keras.metrics.Mean(name="d_loss")
        self.g_loss = keras.metrics.Mean(name="g_loss")

    def compile(self, d_optimizer, g_optimizer):
        super().compile()
        self.d_optimizer, self.g_optimizer = d_optimizer, g_optimizer

    @property
    def metrics(self):
        return [self.d_loss, self.g_loss]

    def discriminate(self, real, noise):
        fake = self.generator(noise)
        logits = self.discriminator(ops.concatenate([fake, real], axis=0))
        count = ops.shape(real)[0]
        labels = ops.concatenate(
            [ops.ones((count, 1)), ops.zeros((count, 1))], axis=0
        )
        return self.loss_fn(labels, logits)

    def mislead(self, noise):
        logits = self.discriminator(self.generator(noise))
        return self.loss_fn(ops.zeros((ops.shape(noise)[0], 1)), logits)

    def turns(self, real, noise):
        """Returns the network, optimizer, metric and loss of each turn."""
        discriminator = (
            self.discriminator,
            self.d_optimizer,
            self.d_loss,
            lambda: self.discriminate(real, noise),
        )
        generator = (
            self.generator,
            self.g_optimizer,
            self.g_loss,
            lambda: self.mislead(noise),
        )
        return discriminator, generator

    def results(self):
        return {metric.name: metric.result() for metric in self.metrics}

    if BACKEND == "tensorflow":

        def train_step(self, data):
            import tensorflow as tf

            for network, optimizer, metric, compute in self.turns(*data):
                with tf.GradientTape() as tape:
                    loss = compute()
                weights = network.trainable_weights
                optimizer.apply_gradients(
                    zip(tape.gradient(loss, weights), weights)
                )
                metric.update_state(loss)
            return self.results()

    elif BACKEND == "torch":

        def train_step(self, data):
            import torch

            for network, optimizer, metric, compute in self.turns(*data):
                self.zero_grad()
                loss = compute()
                loss.backward()
                weights = network.trainable_weights
                with torch.no_grad():
                    optimizer.apply([w.value.grad for w in weights], weights)
                metric.update_state(loss)
            return self.results()


def generative_adversarial_network():
    gan = GAN()
    gan.built = True
    gan.compile(keras.optimizers.SGD(0.05), keras.optimizers.SGD(0.05))
    return _fit(gan, _numbers((8, 6, 6, 1)), _numbers((8, 4), 1))


class PositionalEmbedding(layers.Layer):
    """With a mask of its own, as in the translation example."""

    def __init__(self, length, vocabulary, dim):
        super().__init__()
        self.tokens = layers.Embedding(vocabulary, dim)
        self.positions = layers.Embedding(length, dim)

    def call(self, inputs):
        positions = ops.arange(0, ops.shape(inputs)[-1], 1)
        return self.tokens(inputs) + self.positions(positions)

    def compute_mask(self, inputs, mask=None):
        return ops.not_equal(inputs, 0)


class TransformerDecoder(layers.Layer):
    def __init__(self, dim, hidden, heads):
        super().__init__()
        self.attention_1 = layers.MultiHeadAttention(heads, dim)
        self.attention_2 = layers.MultiHeadAttention(heads, dim)
        self.dense = keras.Sequential(
            [layers.Dense(hidden, activation="relu"), layers.Dense(dim)]
        )
        self.norms = [layers.LayerNormalization() for _ in range(3)]
        self.add = layers.Add()
        self.supports_masking = True

    def call(self, inputs, mask=None):
        inputs, encoded = inputs
        causal = self.causal_mask(inputs)
        padding = causal
        if mask is not None and mask[0] is not None:
            padding = ops.cast(mask[0][:, None, :], dtype="int32")
            padding = ops.minimum(padding, causal)
        x = self.attention_1(inputs, inputs, inputs, attention_mask=padding)
        x = self.norms[0](self.add([inputs, x]))
        y = self.attention_2(query=x, value=encoded, key=encoded)
        y = self.norms[1](self.add([x, y]))
        return self.norms[2](self.add([y, self.dense(y)]))

    def causal_mask(self, inputs):
        shape = ops.shape(inputs)
        i, j = ops.arange(shape[1])[:, None], ops.arange(shape[1])
        mask = ops.cast(i >= j, "int32")
        return ops.reshape(mask, (1, shape[1], shape[1]))


def translation():
    encoder = keras.Input((None,), dtype="int32", name="encoder")
    x = PositionalEmbedding(8, 20, 16)(encoder)
    attended = layers.MultiHeadAttention(2, 16)(x, x)
    encoded = layers.LayerNormalization()(layers.Add()([x, attended]))
    decoder = keras.Input((None,), dtype="int32", name="decoder")
    x = PositionalEmbedding(8, 20, 16)(decoder)
    x = TransformerDecoder(16, 32, 2)([x, encoded])
    x = layers.Dense(20, activation="softmax")(layers.Dropout(0.0)(x))
    model = keras.Model({"encoder": encoder, "decoder": decoder}, x)
    ids, target = _integers(20, (8, 8)), _integers(20, (8, 8), 1)
    ids[:, 6:] = 0
    target[:, 5:] = 0
    loss = keras.losses.SparseCategoricalCrossentropy(ignore_class=0)
    return _trained(model, {"encoder": ids, "decoder": target}, target, loss)


def masked_sequences():
    model = keras.Sequential(
        [
            layers.Embedding(20, 8, mask_zero=True),
            layers.Bidirectional(layers.LSTM(8, return_sequences=True)),
            layers.GRU(8, dropout=0.0),
            layers.Dense(1),
        ]
    )
    ids = _integers(20, (8, 6))
    ids[:, 4:] = 0
    return _trained(model, ids, _numbers((8, 1), 1))


def video_frames():
    inputs = keras.Input((3, 8, 8, 1))
    x = layers.TimeDistributed(layers.Conv2D(4, 3, activation="relu"))(inputs)
    x = layers.ConvLSTM2D(4, 3, padding="same", return_sequences=True)(x)
    x = layers.BatchNormalization()(x)
    x = layers.Conv3D(1, 3, activation="sigmoid", padding="same")(x)
    model = keras.Model(inputs, x)
    x = _numbers((4, 3, 8, 8, 1))
    return _trained(model, x, _numbers((4, 3, 6, 6, 1), 1))


def mobile_network():
    def block(x, filters, strides):
        y = layers.Conv2D(2 * x.shape[-1], 1, use_bias=False)(x)
        y = layers.ReLU(6.0)(layers.BatchNormalization()(y))
        y = layers.DepthwiseConv2D(3, strides=strides, padding="same")(y)
        y = layers.Activation("hard_swish")(layers.BatchNormalization()(y))
        squeezed = layers.GlobalAveragePooling2D(keepdims=True)(y)
        squeezed = layers.Conv2D(4, 1, activation="relu")(squeezed)
        squeezed = layers.Conv2D(y.shape[-1], 1)(squeezed)
        y = layers.Multiply()([y, layers.Activation("hard_sigmoid")(squeezed)])
        y = layers.BatchNormalization()(layers.Conv2D(filters, 1)(y))
        return layers.Add()([x, y]) if strides == 1 else y

    inputs = keras.Input((8, 8, 3))
    x = layers.ZeroPadding2D(1)(inputs)
    x = layers.Conv2D(8, 3, strides=2)(x)
    x = block(block(x, 8, 1), 16, 2)
    x = layers.Dense(4)(layers.GlobalAveragePooling2D()(x))
    model = keras.Model(inputs, x)
    return _trained(model, _numbers((8, 8, 8, 3)), _numbers((8, 4), 1))


class ConvNeXtBlock(layers.Layer):
    def __init__(self, dim):
        super().__init__()
        self.depthwise = layers.Conv2D(dim, 3, padding="same", groups=dim)
        self.norm = layers.LayerNormalization(epsilon=1e-6)
        self.up = layers.Dense(4 * dim, activation="gelu")
        self.down = layers.Dense(dim)

    def build(self, shape):
        self.gamma = self.add_weight(shape=(shape[-1],), initializer="ones")

    def call(self, x):
        y = self.down(self.up(self.norm(self.depthwise(x))))
        return x + self.gamma * y


def conv_next():
    model = keras.Sequential(
        [
            layers.Conv2D(8, 2, strides=2),
            ConvNeXtBlock(8),
            ConvNeXtBlock(8),
            layers.GlobalAveragePooling2D(),
            layers.Dense(4),
        ]
    )
    return _trained(model, _numbers((8, 8, 8, 3)), _numbers((8, 4), 1))


class MixerBlock(layers.Layer):
    def __init__(self, patches, dim):
        super().__init__()
        self.tokens = keras.Sequential(
            [layers.Dense(2 * patches, "gelu"), layers.Dense(patches)]
        )
        self.channels = keras.Sequential(
            [layers.Dense(2 * dim, "gelu"), layers.Dense(dim)]
        )
        self.normalize = layers.LayerNormalization(epsilon=1e-6)

    def call(self, inputs):
        x = self.normalize(inputs)
        x = ops.transpose(x, axes=(0, 2, 1))
        x = ops.transpose(self.tokens(x), axes=(0, 2, 1))
        x = x + inputs
        return x + self.channels(self.normalize(x))


def mlp_mixer():
    model = keras.Sequential(
        [
            keras.Input((8, 12)),
            layers.Dense(16),
            MixerBlock(8, 16),
            MixerBlock(8, 16),
            layers.GlobalAveragePooling1D(),
            layers.Dense(3),
        ]
    )
    return _trained(model, _numbers((8, 8, 12)), _numbers((8, 3), 1))


class FNetEncoder(layers.Layer):
    def __init__(self, dim):
        super().__init__()
        self.dense = keras.Sequential(
            [layers.Dense(2 * dim, "relu"), layers.Dense(dim)]
        )
        self.norms = layers.LayerNormalization(), layers.LayerNormalization()

    def call(self, x):
        real, _ = ops.fft2((ops.cast(x, "float32"), ops.zeros_like(x)))
        x = self.norms[0](x + real)
        return self.norms[1](x + self.dense(x))


def fourier_network():
    model = keras.Sequential(
        [
            layers.Dense(8),
            FNetEncoder(8),
            layers.GlobalAveragePooling1D(),
            layers.Dense(2),
        ]
    )
    return _trained(model, _numbers((8, 4, 6)), _numbers((8, 2), 1))


class Perceiver(keras.Model):
    """Learned latents that attend to the inputs."""

    def __init__(self, latents, dim):
        super().__init__()
        self.count, self.dim = latents, dim
        self.embed = layers.Dense(dim)
        self.cross = layers.Attention(use_scale=True)
        self.query, self.key, self.value = (layers.Dense(dim) for _ in "qkv")
        self.mlp = layers.Dense(dim, "gelu")
        self.head = layers.Dense(3)

    def build(self, shape):
        self.latents = self.add_weight(
            shape=(self.count, self.dim), initializer="random_normal"
        )
        super().build(shape)

    def call(self, x):
        x = self.embed(x)
        latents = ops.expand_dims(self.latents, 0)
        found = self.cross([self.query(latents), self.key(x), self.value(x)])
        found = latents + self.mlp(found)
        return self.head(ops.mean(found, axis=1))


def perceiver():
    model = Perceiver(4, 8)
    return _trained(model, _numbers((8, 6, 5)), _numbers((8, 3), 1))


def window_partition(x, size):
    _, height, width, channels = x.shape
    x = ops.reshape(
        x, (-1, height // size, size, width // size, size, channels)
    )
    x = ops.transpose(x, (0, 1, 3, 2, 4, 5))
    return ops.reshape(x, (-1, size * size, channels))


class WindowAttention(layers.Layer):
    def __init__(self, dim, heads, size):
        super().__init__()
        self.heads, self.size, self.dim = heads, size, dim
        self.qkv = layers.Dense(3 * dim)
        self.proj = layers.Dense(dim)
        self.scale = (dim // heads) ** -0.5

    def call(self, x):
        shape = ops.shape(x)
        x = ops.roll(x, shift=(-1, -1), axis=(1, 2))
        windows = window_partition(x, self.size)
        qkv = ops.reshape(
            self.qkv(windows),
            (-1, self.size**2, 3, self.heads, self.dim // self.heads),
        )
        qkv = ops.transpose(qkv, (2, 0, 3, 1, 4))
        q, k, v = qkv[0] * self.scale, qkv[1], qkv[2]
        weights = ops.softmax(q @ ops.transpose(k, (0, 1, 3, 2)), axis=-1)
        y = ops.transpose(weights @ v, (0, 2, 1, 3))
        y = self.proj(ops.reshape(y, (-1, self.size**2, self.dim)))
        parts = shape[1] // self.size
        y = ops.reshape(y, (-1, parts, parts, self.size, self.size, self.dim))
        y = ops.transpose(y, (0, 1, 3, 2, 4, 5))
        y = ops.reshape(y, (-1, shape[1], shape[2], self.dim))
        return ops.roll(y, shift=(1, 1), axis=(1, 2))


def swin_transformer():
    inputs = keras.Input((4, 4, 8))
    x = layers.LayerNormalization()(inputs)
    x = layers.Add()([inputs, WindowAttention(8, 2, 2)(x)])
    x = layers.Dense(8)(layers.Dense(16, activation="gelu")(x))
    model = keras.Model(inputs, layers.GlobalAveragePooling2D()(x))
    return _trained(model, _numbers((8, 4, 4, 8)), _numbers((8, 8), 1))


class DualEncoder(keras.Model):
    """Every image of a batch is compared with every caption of it."""

    def __init__(self):
        super().__init__()
        self.image = keras.Sequential(
            [layers.Dense(16, "gelu"), layers.Dense(8)]
        )
        self.text = keras.Sequential(
            [layers.Embedding(20, 8), layers.GlobalAveragePooling1D()]
        )

    def call(self, inputs):
        image, text = inputs
        return self.image(image), self.text(text)

    def compute_loss(
        self,
        x=None,
        y=None,
        y_pred=None,
        sample_weight=None,
        allow_empty=False,
    ):
        image, text = (ops.normalize(e, axis=-1) for e in y_pred)
        logits = ops.matmul(text, ops.transpose(image)) / 0.5
        images = ops.matmul(image, ops.transpose(image))
        texts = ops.matmul(text, ops.transpose(text))
        targets = ops.softmax((texts + images) / (2 * 0.5))
        losses = keras.losses.categorical_crossentropy(
            targets, logits, from_logits=True
        )
        swapped = keras.losses.categorical_crossentropy(
            ops.transpose(targets), ops.transpose(logits), from_logits=True
        )
        return ops.mean(losses + swapped) / 2


def dual_encoder():
    model = DualEncoder()
    model.compile(keras.optimizers.SGD(0.1))
    return _fit(model, [_numbers((8, 6)), _integers(20, (8, 5))])


class VectorQuantizer(layers.Layer):
    """Codes by their nearest neighbour; gradients pass straight through."""

    def __init__(self, codes, dim):
        super().__init__()
        self.codes, self.dim = codes, dim

    def build(self, shape):
        self.embeddings = self.add_weight(
            shape=(self.dim, self.codes), initializer="uniform", name="codes"
        )

    def call(self, x):
        flat = ops.reshape(x, (-1, self.dim))
        similarity = ops.matmul(flat, self.embeddings)
        distances = (
            ops.sum(flat**2, axis=1, keepdims=True)
            + ops.sum(self.embeddings**2, axis=0)
            - 2 * similarity
        )
        encodings = ops.one_hot(ops.argmin(distances, axis=1), self.codes)
        quantized = ops.matmul(encodings, ops.transpose(self.embeddings))
        quantized = ops.reshape(quantized, ops.shape(x))
        self.add_loss(
            0.25 * ops.mean((ops.stop_gradient(quantized) - x) ** 2)
            + ops.mean((quantized - ops.stop_gradient(x)) ** 2)
        )
        return x + ops.stop_gradient(quantized - x)


def vector_quantized():
    inputs = keras.Input((8, 8, 1))
    x = layers.Conv2D(8, 3, strides=2, padding="same")(inputs)
    x = VectorQuantizer(16, 8)(layers.Conv2D(8, 1, padding="same")(x))
    x = layers.Conv2DTranspose(8, 3, strides=2, padding="same")(x)
    model = keras.Model(inputs, layers.Conv2D(1, 3, padding="same")(x))
    x = _numbers((8, 8, 8, 1))
    return _trained(model, x, x)


class PixelConv(layers.Layer):
    """A convolution whose kernel is masked."""

    def __init__(self, **kwargs):
        super().__init__()
        self.conv = layers.Conv2D(**kwargs)

    def build(self, shape):
        self.conv.build(shape)
        rows, columns, *others = self.conv.kernel.shape
        mask = np.zeros((rows, columns, *others), "float32")
        mask[: rows // 2] = 1.0
        mask[rows // 2, : columns // 2] = 1.0
        self.mask = ops.convert_to_tensor(mask)

    def call(self, inputs):
        self.conv.kernel.assign(self.conv.kernel * self.mask)
        return self.conv(inputs)


def pixel_network():
    inputs = keras.Input((6, 6, 1))
    x = PixelConv(filters=8, kernel_size=3, activation="relu", padding="same")(
        inputs
    )
    x = layers.Conv2D(1, 1, activation="sigmoid")(x)
    model = keras.Model(inputs, x)
    x = np.round(1 / (1 + np.exp(-_numbers((8, 6, 6, 1)))))
    return _trained(model, x, x, "binary_crossentropy")


class GatedResidual(layers.Layer):
    def __init__(self, units):
        super().__init__()
        self.units = units
        self.elu = layers.Dense(units, activation="elu")
        self.linear = layers.Dense(units)
        self.gate = layers.Dense(units, activation="sigmoid")
        self.value = layers.Dense(units)
        self.norm = layers.LayerNormalization()
        self.project = layers.Dense(units)

    def call(self, inputs):
        x = self.linear(self.elu(inputs))
        if inputs.shape[-1] != self.units:
            inputs = self.project(inputs)
        return self.norm(inputs + self.value(x) * self.gate(x))


class VariableSelection(layers.Layer):
    def __init__(self, count, units):
        super().__init__()
        self.grns = [GatedResidual(units) for _ in range(count)]
        self.concat = GatedResidual(units)
        self.softmax = layers.Dense(count, activation="softmax")

    def call(self, inputs):
        v = ops.concatenate(inputs, axis=1)
        v = ops.expand_dims(self.softmax(self.concat(v)), axis=-1)
        x = ops.stack([g(i) for g, i in zip(self.grns, inputs)], axis=1)
        return ops.squeeze(
            ops.matmul(ops.transpose(v, axes=[0, 2, 1]), x), axis=1
        )


def gated_selection():
    inputs = [keras.Input((3,), name=f"feature_{i}") for i in range(3)]
    x = VariableSelection(3, 8)([layers.Dense(4)(i) for i in inputs])
    model = keras.Model(inputs, layers.Dense(1, activation="sigmoid")(x))
    x = [_numbers((8, 3), i) for i in range(3)]
    return _trained(model, x, _integers(2, (8, 1)), "binary_crossentropy")


class CTCLayer(layers.Layer):
    def call(self, y_true, y_pred):
        length = ops.ones((ops.shape(y_pred)[0],), "int32")
        loss = ops.ctc_loss(
            y_true,
            y_pred,
            length * ops.shape(y_true)[1],
            length * ops.shape(y_pred)[1],
            mask_index=0,
        )
        self.add_loss(ops.mean(loss))
        return y_pred


def text_recognition():
    images = keras.Input((16, 8, 1), name="image")
    labels = keras.Input((3,), name="label", dtype="int32")
    x = layers.Conv2D(8, 3, activation="relu", padding="same")(images)
    x = layers.MaxPooling2D((2, 2))(x)
    x = layers.Reshape((8, 4 * 8))(x)
    x = layers.Dense(16, activation="relu")(x)
    x = layers.Bidirectional(layers.LSTM(8, return_sequences=True))(x)
    x = layers.Dense(7)(x)
    model = keras.Model([images, labels], CTCLayer()(labels, x))
    model.compile(keras.optimizers.SGD(0.01))
    return _fit(
        model,
        {"image": _numbers((8, 16, 8, 1)), "label": 1 + _integers(6, (8, 3))},
    )


class MinimalCell(layers.Layer):
    def __init__(self, units):
        super().__init__()
        self.units = self.state_size = units

    def build(self, shape):
        self.kernel = self.add_weight(
            shape=(shape[-1], self.units), initializer="uniform"
        )
        self.recurrent = self.add_weight(
            shape=(self.units, self.units), initializer="uniform"
        )
        self.built = True

    def call(self, inputs, states):
        h = ops.matmul(inputs, self.kernel)
        output = ops.tanh(h + ops.matmul(states[0], self.recurrent))
        return output, [output]


def own_recurrent_cell():
    inputs = keras.Input((5, 4))
    x = layers.RNN(MinimalCell(8), return_sequences=True)(inputs)
    x = layers.RNN([layers.LSTMCell(8), layers.GRUCell(8)])(x)
    model = keras.Model(inputs, layers.Dense(1)(x))
    return _trained(model, _numbers((8, 5, 4)), _numbers((8, 1), 1))


def sequence_to_sequence():
    """The decoder starts from the last states of the encoder."""
    source, target = keras.Input((None, 6)), keras.Input((None, 6))
    _, h, c = layers.LSTM(8, return_state=True)(source)
    x = layers.LSTM(8, return_sequences=True)(target, initial_state=[h, c])
    x = layers.AdditiveAttention()([x, x])
    model = keras.Model(
        [source, target], layers.Dense(6, activation="softmax")(x)
    )
    x = [_numbers((8, 4, 6)), _numbers((8, 5, 6), 1)]
    y = np.eye(6, dtype="float32")[_integers(6, (8, 5))]
    return _trained(model, x, y, "categorical_crossentropy")


def own_losses():
    """Focal, dice and quantile losses, and a tensor of logits."""

    def focal(y, p):
        p = ops.clip(p, 1e-7, 1 - 1e-7)
        pt = ops.where(ops.equal(y, 1), p, 1 - p)
        return -ops.sum(ops.power(1 - pt, 2.0) * ops.log(pt), axis=-1)

    def dice(y, p):
        y, p = ops.reshape(y, (-1,)), ops.reshape(p, (-1,))
        return 1 - (2 * ops.sum(y * p) + 1) / (ops.sum(y) + ops.sum(p) + 1)

    def pinball(y, p):
        error = y - p
        return ops.mean(ops.maximum(0.9 * error, -0.1 * error), axis=-1)

    inputs = keras.Input((6,))
    x = layers.Dense(16, activation="relu")(inputs)
    outputs = [
        layers.Dense(4, activation="sigmoid", name="a")(x),
        layers.Dense(4, activation="sigmoid", name="b")(x),
        layers.Dense(4, name="c")(x),
    ]
    model = keras.Model(inputs, outputs)
    model.compile(keras.optimizers.SGD(0.05), loss=[focal, dice, pinball])
    y = _integers(2, (8, 4)).astype("float32")
    return _fit(model, _numbers((8, 6)), [y, y, y])


class Nested(keras.Model):
    """Parts in lists and dicts, shared, and called with options."""

    def __init__(self):
        super().__init__()
        shared = layers.Dense(8, activation="silu")
        self.branches = {"a": [shared, layers.Dense(8)], "b": [shared]}
        self.blocks = [
            keras.Sequential([layers.Dense(8), layers.Dropout(0.0)])
            for _ in range(2)
        ]
        self.scale = keras.Variable(np.ones((8,), "float32"), name="scale")
        self.head = layers.Dense(2, kernel_regularizer="l2")

    def call(self, x, training=None, doubled=False):
        found = []
        for parts in self.branches.values():
            y = x
            for part in parts:
                y = part(y)
            found.append(y)
        x = ops.max(ops.stack(found, 0), axis=0) * self.scale
        for block in self.blocks:
            x = x + block(x, training=training)
        return self.head(2 * x if doubled else x)


def nested_parts():
    model = Nested()
    x, y = _numbers((8, 8)), _numbers((8, 2), 1)
    found = _trained(model, x, y, weighted_metrics=["mae"])
    return found + _flat(model(x[:1], doubled=True), model.losses)


def instance_contrast():
    """Pairs from one batch: a loss over all others of the batch."""

    class Contrast(keras.Model):
        def __init__(self):
            super().__init__()
            self.encoder = layers.Dense(16, "relu")
            self.projection = layers.Dense(8)

        def call(self, x):
            return self.projection(self.encoder(x))

        def compute_loss(
            self,
            x=None,
            y=None,
            y_pred=None,
            sample_weight=None,
            allow_empty=False,
        ):
            first = ops.normalize(y_pred, axis=1)
            second = ops.normalize(self(x * 1.1 + 0.1), axis=1)
            logits = ops.matmul(first, ops.transpose(second)) / 0.5
            labels = ops.arange(ops.shape(logits)[0])
            return ops.mean(
                keras.losses.sparse_categorical_crossentropy(
                    labels, logits, from_logits=True
                )
            )

    model = Contrast()
    model.compile(keras.optimizers.SGD(0.1))
    return _fit(model, _numbers((8, 6)))


def time_series():
    inputs = keras.Input((16, 2))
    x = layers.Conv1D(8, 4, strides=2, padding="causal")(inputs)
    x = layers.Conv1D(8, 3, dilation_rate=2, padding="same")(x)
    x = layers.Conv1DTranspose(8, 4, strides=2, padding="same")(x)
    x = layers.AveragePooling1D(2)(x)
    x = layers.UpSampling1D(2)(x)
    x = layers.Cropping1D(2)(layers.ZeroPadding1D(2)(x))
    model = keras.Model(inputs, layers.Conv1D(2, 3, padding="same")(x))
    x = _numbers((8, 16, 2))
    return _trained(model, x, x)


def image_options():
    """Normalizations and activations of many kinds on images."""
    inputs = keras.Input((8, 8, 8))
    x = layers.GroupNormalization(4)(layers.Conv2D(8, 3)(inputs))
    x = layers.PReLU(shared_axes=[1, 2])(x)
    x = layers.SpatialDropout2D(0.0)(x)
    x = layers.UnitNormalization(axis=-1)(x)
    x = layers.SpectralNormalization(layers.Conv2D(8, 3))(x)
    x = layers.Maximum()([x, layers.Minimum()([x, -x])])
    x = layers.RMSNormalization()(layers.ELU()(x))
    x = layers.Subtract()([x, layers.Average()([x, 2 * x])])
    x = layers.Permute((3, 1, 2))(x)
    x = layers.Softmax()(layers.Reshape((8, 16))(x))
    model = keras.Model(inputs, layers.Dense(2)(layers.Flatten()(x)))
    return _trained(model, _numbers((8, 8, 8, 8)), _numbers((8, 2), 1))


RECIPES = {
    function.__name__: function
    for function in (
        translation,
        masked_sequences,
        video_frames,
        mobile_network,
        conv_next,
        mlp_mixer,
        fourier_network,
        perceiver,
        swin_transformer,
        dual_encoder,
        vector_quantized,
        pixel_network,
        gated_selection,
        text_recognition,
        own_recurrent_cell,
        sequence_to_sequence,
        own_losses,
        nested_parts,
        instance_contrast,
        time_series,
        image_options,
    )
}
if BACKEND != "jax":
    RECIPES["generative_adversarial_network"] = generative_adversarial_network
