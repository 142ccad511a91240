"""Recipes that users write; each returns numbers.

`gpu.py` runs them under `TensorParallel` and in plain Keras, and compares.
"""

import pathlib
import tempfile

import keras
import keras_hub
import numpy as np
from keras import layers


def _arrays(*shape, seed=0):
    rng = np.random.default_rng(seed)
    return rng.standard_normal(shape).astype("float32")


def _dense(dropout=0.0):
    keras.utils.set_random_seed(0)
    return keras.Sequential(
        [
            keras.Input((16,)),
            layers.Dense(64, "relu"),
            layers.BatchNormalization(),
            layers.Dropout(dropout),
            layers.Dense(4),
        ]
    )


def _fit(model, x, y, optimizer, **arguments):
    model.compile(optimizer, "mse", metrics=["mae"], **arguments)
    history = model.fit(
        x, y, batch_size=8, epochs=2, shuffle=False, verbose=0
    ).history
    return [*history["loss"], *history["mae"]]


def _without_input():
    keras.utils.set_random_seed(0)
    model = keras.Sequential([layers.Dense(32, "relu"), layers.Dense(4)])
    return _fit(model, _arrays(32, 16), _arrays(32, 4), "adam")


def _dropout():
    model = _dense(0.3)
    return _fit(model, _arrays(32, 16), _arrays(32, 4), "sgd")


def _optimizer_options():
    optimizer = keras.optimizers.AdamW(
        1e-2,
        clipnorm=0.5,
        use_ema=True,
        ema_momentum=0.9,
        gradient_accumulation_steps=2,
    )
    model = _dense()
    losses = _fit(model, _arrays(32, 16), _arrays(32, 4), optimizer)
    return [*losses, *_predicted(model)]


def _predicted(model, seed=1):
    return model.predict(_arrays(8, 16, seed=seed), verbose=0).ravel()


def _muon():
    optimizer = keras.optimizers.Muon(1e-2)
    return _fit(_dense(), _arrays(32, 16), _arrays(32, 4), optimizer)


def _half_precision():
    policy = keras.dtype_policies.DTypePolicy("mixed_float16")
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.Input((16,)),
            layers.Dense(64, "relu", dtype=policy),
            layers.Dense(4, dtype=policy),
        ]
    )
    return _fit(model, _arrays(32, 16), _arrays(32, 4), "adam")


def _convolutions():
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.Input((16, 16, 3)),
            layers.Conv2D(16, 3, padding="same", activation="relu"),
            layers.BatchNormalization(),
            layers.MaxPooling2D(),
            layers.SeparableConv2D(32, 3, activation="relu"),
            layers.GlobalAveragePooling2D(),
            layers.Dense(4),
        ]
    )
    return _fit(model, _arrays(16, 16, 16, 3), _arrays(16, 4), "adam")


def _recurrent():
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.Input((12, 16)),
            layers.Bidirectional(layers.LSTM(16, return_sequences=True)),
            layers.GRU(16),
            layers.Dense(4),
        ]
    )
    return _fit(model, _arrays(16, 12, 16), _arrays(16, 4), "adam")


def _rematerialized():
    with keras.RematScope("full"):
        model = _dense()
    return _fit(model, _arrays(32, 16), _arrays(32, 4), "adam")


def _files():
    model = _dense()
    losses = _fit(model, _arrays(32, 16), _arrays(32, 4), "adam")
    with tempfile.TemporaryDirectory() as folder:
        path = str(pathlib.Path(folder, "model.keras"))
        model.save(path)
        again = keras.saving.load_model(path)
        assert np.array_equal(_predicted(model), _predicted(again))
        path = str(pathlib.Path(folder, "model.weights.h5"))
        model.save_weights(path)
        again.load_weights(path)
    return [*losses, *_predicted(again)]


def _one_batch():
    model = _dense()
    model.compile("adam", "mse")
    x, y = _arrays(8, 16), _arrays(8, 4)
    losses = [float(model.train_on_batch(x, y)) for _ in range(3)]
    losses.append(float(model.evaluate(x, y, verbose=0)))
    return [*losses, *np.ravel(keras.ops.convert_to_numpy(model(x)))]


def _adapters():
    model = _dense()
    model.layers[0].enable_lora(4)
    losses = _fit(model, _arrays(32, 16), _arrays(32, 4), "adam")
    return [*losses, *_predicted(model)]


def _quantized():
    model = _dense()
    _fit(model, _arrays(32, 16), _arrays(32, 4), "adam")
    model.quantize("int8")
    return _predicted(model)


def _gpt2():
    keras.utils.set_random_seed(0)
    backbone = keras_hub.models.GPT2Backbone(
        vocabulary_size=64,
        num_layers=2,
        num_heads=4,
        hidden_dim=32,
        intermediate_dim=64,
        max_sequence_length=32,
    )
    return keras_hub.models.GPT2CausalLM(backbone=backbone, preprocessor=None)


def _generated():
    model = _gpt2()
    model.compile(sampler="greedy")
    rng = np.random.default_rng(0)
    prompt = {
        "token_ids": rng.integers(64, size=(2, 16)).astype("int32"),
        "padding_mask": np.repeat([[1] * 6 + [0] * 10], 2, 0).astype("int32"),
    }
    found = model.generate(prompt, stop_token_ids=None)
    return np.ravel(keras.ops.convert_to_numpy(found["token_ids"]))


def _vision_transformer():
    keras.utils.set_random_seed(0)
    backbone = keras_hub.models.ViTBackbone(
        image_shape=(32, 32, 3),
        patch_size=8,
        num_layers=2,
        num_heads=4,
        hidden_dim=32,
        mlp_dim=64,
        dropout_rate=0.0,
        attention_dropout=0.0,
    )
    x = layers.GlobalAveragePooling1D()(backbone.output)
    model = keras.Model(backbone.inputs, layers.Dense(4)(x))
    return _fit(model, _arrays(16, 32, 32, 3), _arrays(16, 4), "adam")


FEATURES = {
    "without input": _without_input,
    "dropout": _dropout,
    "optimizer options": _optimizer_options,
    "muon": _muon,
    "half precision": _half_precision,
    "convolutions": _convolutions,
    "recurrent": _recurrent,
    "rematerialized": _rematerialized,
    "files": _files,
    "one batch": _one_batch,
    "adapters": _adapters,
    "quantized": _quantized,
    "generated": _generated,
    "vision transformer": _vision_transformer,
}
