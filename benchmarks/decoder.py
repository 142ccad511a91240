"""The transformer decoder that every backend trains, as a Keras model."""

import keras
import numpy as np
from keras import layers

HEAD_SIZE = 32
VOCABULARY = 256
SEQUENCE_LENGTH = 64
BATCH_SIZE = 8
# Small, so that the losses of two sides stay comparable over many turns: Adam
# adds its epsilon in different places in torch and in Keras.
LEARNING_RATE = 1e-5

LAYOUTS = {
    ".*attention/(query|key|value)/kernel": (None, "model", None),
    ".*attention/(query|key|value)/bias": ("model", None),
    ".*attention_output/kernel": ("model", None, None),
    ".*up/kernel": (None, "model"),
    ".*up/bias": ("model",),
    ".*down/kernel": ("model", None),
    ".*tokens/embeddings": ("model", None),
    ".*logits/kernel": (None, "model"),
    ".*logits/bias": ("model",),
}


def distribution_of(library, options):
    """Returns the distribution, made of one library's classes.

    Args:
        library: Module, `keras.distribution` or `keras_tp.distribution`.
        options: Namespace of `step_time.py`'s options.
    """
    mesh = library.DeviceMesh(
        (1, options.devices),
        ["batch", "model"],
        library.list_devices()[: options.devices],
    )
    layout_map = library.LayoutMap(mesh)
    for pattern, axes in LAYOUTS.items():
        layout_map[pattern] = library.TensorLayout(axes, mesh)
    return library.ModelParallel(layout_map=layout_map, batch_dim_name="batch")


def build_model(options):
    """Returns a compiled decoder, with the same initial weights each time."""
    keras.utils.set_random_seed(0)
    inputs = keras.Input((SEQUENCE_LENGTH,), dtype="int32")
    x = layers.Embedding(VOCABULARY, options.hidden, name="tokens")(inputs)
    for i in range(options.layers):
        attention = layers.MultiHeadAttention(
            options.hidden // HEAD_SIZE, HEAD_SIZE, name=f"{i}_attention"
        )
        y = layers.LayerNormalization(name=f"{i}_norm_a")(x)
        x = x + attention(y, y, use_causal_mask=True)
        y = layers.LayerNormalization(name=f"{i}_norm_b")(x)
        y = layers.Dense(4 * options.hidden, "gelu", name=f"{i}_up")(y)
        x = x + layers.Dense(options.hidden, name=f"{i}_down")(y)
    outputs = layers.Dense(VOCABULARY, name="logits")(x)
    model = keras.Model(inputs, outputs)
    model.compile(
        keras.optimizers.Adam(LEARNING_RATE),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        jit_compile=True if options.jit else "auto",
    )
    return model


def make_data(options):
    """Returns the inputs and targets of one turn, as arrays."""
    rng = np.random.default_rng(0)
    shape = (options.steps * BATCH_SIZE, SEQUENCE_LENGTH)
    x = rng.integers(VOCABULARY, size=shape).astype("int32")
    return x, np.roll(x, -1, axis=1)


def train_epoch(model, x, y=None):
    """Trains one epoch, the turn of a Keras model, and returns its loss.

    Args:
        model: The compiled model.
        x: Inputs as an array, or a `tf.data.Dataset` of batches.
        y: Targets as an array.
    """
    arguments = {} if y is None else {"batch_size": BATCH_SIZE}
    history = model.fit(x, y, shuffle=False, verbose=0, **arguments)
    return history.history["loss"][0]
