"""Small models with layouts, their data, and how to train them."""

import collections

import keras
import numpy as np
from keras import layers

from keras_tp import backend
from keras_tp import distribution

BATCH, LENGTH, WIDTH, HEADS, WORDS = 4, 6, 16, 4, 24
COLUMN, ROW = (None, "model"), ("model", None)


class Case(collections.namedtuple("Case", "build x y layouts uneven")):
    """A model to train.

    Args:
        build: Callable that returns a model.
        x: Array, a batch of inputs.
        y: Array, a batch of targets.
        layouts: Dict of patterns to axes.
        uneven: Boolean. Whether the devices do not divide the split dims.
    """


def _floats(*shape):
    return np.random.default_rng(0).standard_normal(shape, "float32")


def _words():
    # Each word once: TensorFlow's optimizers add up gradients of a row that is
    # looked up twice in another way than those of JAX and torch.
    words = np.random.default_rng(0).permutation(WORDS)
    return words.reshape(BATCH, LENGTH).astype("int32")


def pairs(units=8 * WIDTH, count=1):
    """Returns a model of column- and row-parallel pairs."""
    inputs = x = keras.Input((WIDTH,))
    for i in range(count):
        x = layers.Dense(units, activation="tanh", name=f"up_{i}")(x)
        x = layers.Dense(WIDTH, name=f"down_{i}")(x)
    return keras.Model(inputs, x)


def transformer():
    """Returns a decoder block with a table of words before and after it."""
    inputs = keras.Input((LENGTH,), dtype="int32")
    x = layers.Embedding(WORDS, WIDTH, name="lookup")(inputs)
    h = layers.LayerNormalization()(x)
    attention = layers.MultiHeadAttention(HEADS, WIDTH // HEADS, name="heads")
    x = x + attention(h, h, use_causal_mask=True)
    h = layers.LayerNormalization()(x)
    h = layers.Dense(4 * WIDTH, activation="gelu", name="up")(h)
    x = x + layers.Dense(WIDTH, name="down")(h)
    return keras.Model(inputs, layers.Dense(WORDS, name="words")(x))


def images():
    """Returns a pair of convolutions with a normalization between them."""
    inputs = keras.Input((8, 8, 4))
    # The normalization takes a bias away: its gradient is rounding.
    up = layers.Conv2D(4 * WIDTH, 3, padding="same", use_bias=False, name="up")
    x = up(inputs)
    x = keras.ops.relu(layers.BatchNormalization(name="norm")(x))
    x = layers.Conv2D(4, 1, name="down")(x)
    return keras.Model(inputs, x)


PAIR = {".*up_./kernel": COLUMN, ".*up_./bias": ("model",)}
PAIR |= {".*down_./kernel": ROW}
BLOCK = {
    ".*lookup/embeddings": ROW,
    ".*(query|key|value)/kernel": (None, "model", None),
    ".*(query|key|value)/bias": ("model", None),
    ".*attention_output/kernel": ("model", None, None),
    ".*up/kernel": COLUMN,
    ".*up/bias": ("model",),
    ".*down/kernel": ROW,
    ".*words/kernel": COLUMN,
    ".*words/bias": ("model",),
}
CHANNELS = {
    ".*up/kernel": (None, None, None, "model"),
    ".*norm/(gamma|beta|moving_.*)": ("model",),
    ".*down/kernel": (None, None, "model", None),
}
CASES = {
    "pair": Case(
        pairs, _floats(BATCH, WIDTH), _floats(BATCH, WIDTH), PAIR, False
    ),
    "uneven": Case(
        lambda: pairs(8 * WIDTH + 1),
        _floats(BATCH, WIDTH),
        _floats(BATCH, WIDTH),
        PAIR,
        True,
    ),
    "transformer": Case(
        transformer, _words(), _floats(BATCH, LENGTH, WORDS), BLOCK, False
    ),
    "images": Case(
        images,
        _floats(BATCH, 8, 8, 4),
        _floats(BATCH, 8, 8, 4),
        CHANNELS,
        False,
    ),
}


def mesh(batch=1):
    """Returns a mesh of all devices; `batch` of them along the batch axis."""
    devices = distribution.list_devices()
    shape = batch, len(devices) // batch
    return distribution.DeviceMesh(shape, ["batch", "model"], devices)


def axis(name):
    """Returns a mesh of all devices along one axis."""
    devices = distribution.list_devices()
    return distribution.DeviceMesh((len(devices),), [name], devices)


def split(model):
    """Returns the paths of the variables that the live arrays show as split."""
    lib = backend.distribution_lib
    return {
        v.path
        for v in model.trainable_variables
        if any(lib.variable_axes(v) or ())
    }


def model_parallel(case, batch=1):
    """Returns the `ModelParallel` with the layouts of a case."""
    layout_map = distribution.LayoutMap(mesh(batch))
    for pattern, axes in case.layouts.items():
        layout = distribution.TensorLayout(axes, layout_map.device_mesh)
        layout.uneven = case.uneven
        layout_map[pattern] = layout
    return distribution.ModelParallel(
        layout_map=layout_map, batch_dim_name="batch"
    )


def made(case):
    """Returns a compiled model, always with the same weights."""
    keras.utils.set_random_seed(1)
    model = case.build()
    model.compile(keras.optimizers.Adam(0.01), "mse")
    return model


def trained(case, steps=3):
    """Returns a trained model and its losses."""
    model = made(case)
    return model, [model.train_on_batch(case.x, case.y) for _ in range(steps)]


def values(model):
    """Returns the weights of a model, as arrays."""
    return [keras.ops.convert_to_numpy(v) for v in model.weights]


def assert_close(found, expected, tolerance=1e-5):
    """Compares lists of arrays or numbers."""
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)
