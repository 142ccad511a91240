"""Ten combinations of model, mesh and distribution, each run by its name.

    python -m integration_tests.combinations FOLDER pair_2x2 plain

trains two, each in a fresh process, and writes their numbers to files that are
named like them.
"""

import os
import pathlib
import sys

import keras
import numpy as np
from keras import layers

from integration_tests import harness
from integration_tests import slow_tests
from keras_tp import distribution as dist


def mesh(*shape):
    return harness.mesh(harness.fitted(shape))


def model_parallel(patterns, *shape):
    layout_map = dist.LayoutMap(mesh(*shape))
    for pattern, axes in patterns.items():
        layout_map[pattern] = axes
    return dist.ModelParallel(layout_map=layout_map)


def mlp():
    return keras.Sequential(
        [
            keras.Input((6,)),
            layers.Dense(16, activation="gelu", name="up"),
            layers.Dropout(0.3, name="drop"),
            layers.Dense(4, name="down"),
        ]
    )


def attention():
    inputs = keras.Input((5, 6))
    h = layers.MultiHeadAttention(4, 3, name="mha")(inputs, inputs)
    return keras.Model(inputs, layers.Dense(4, name="head")(h + inputs))


def convolution():
    return keras.Sequential(
        [
            keras.Input((8, 8, 3)),
            layers.Conv2D(8, 3, name="conv"),
            layers.BatchNormalization(name="norm"),
            layers.GlobalAveragePooling2D(),
            layers.Dense(4, name="head"),
        ]
    )


def recurrent():
    return keras.Sequential(
        [
            keras.Input((5,), dtype="int32"),
            layers.Embedding(12, 8, name="tokens"),
            layers.LSTM(8, name="lstm"),
            layers.Dense(4, name="head"),
        ]
    )


PAIR = {
    ".*up/kernel": (None, "model"),
    ".*up/bias": ("model",),
    ".*down/kernel": ("model", None),
}
HEADS = {
    ".*mha/(query|key|value)/kernel": (None, "model", None),
    ".*mha/(query|key|value)/bias": ("model", None),
    ".*mha/attention_output/kernel": ("model", None, None),
}


def fit(model, optimizer="adam"):
    """Trains a model and returns its losses, weights and predictions."""
    rng = np.random.default_rng(7)
    # Batches of one size, so that each function is compiled once.
    x = rng.normal(size=(8, *model.input_shape[1:])).astype("float32")
    if model.inputs[0].dtype == "int32":
        x = rng.integers(0, 12, size=(8, 5)).astype("int32")
    y = rng.normal(size=(8, *model.output_shape[1:])).astype("float32")
    model.compile(optimizer, "mse", metrics=["mae"])
    history = model.fit(x, y, batch_size=4, epochs=2, verbose=0).history
    numbers = {f"history_{key}": np.array(v) for key, v in history.items()}
    numbers["predictions"] = model.predict(x, batch_size=4, verbose=0)
    for i, value in enumerate(model.get_weights()):
        numbers[f"weight_{i}"] = value
    return numbers


def under(distribution, build, **kwargs):
    with distribution.scope():
        return fit(build(), **kwargs)


def set_and_unset(distribution, build):
    dist.set_distribution(distribution)
    model = build()
    # The model remembers; the setting is gone by the time it trains.
    dist.set_distribution(None)
    return fit(model)


def there_and_back():
    model = mlp()
    fit(model)
    dist.distribute_model(model, model_parallel(PAIR, 1, 4))
    fit(model)
    dist.distribute_model(model, dist.DataParallel(devices=["cpu:0"]))
    return fit(model)


COMBINATIONS = {
    "plain": lambda: fit(mlp()),
    "pair_1x2": lambda: under(model_parallel(PAIR, 1, 2), mlp),
    "pair_1x4": lambda: under(model_parallel(PAIR, 1, 4), mlp, optimizer="sgd"),
    "pair_2x2": lambda: under(model_parallel(PAIR, 2, 2), mlp),
    "data_4": lambda: under(
        dist.DataParallel(devices=dist.list_devices()[:4]), convolution
    ),
    "heads_1x4": lambda: set_and_unset(model_parallel(HEADS, 1, 4), attention),
    "heads_2x2": lambda: under(model_parallel(HEADS, 2, 2), attention),
    "vocabulary_1x2": lambda: under(
        model_parallel({".*tokens/embeddings": ("model", None)}, 1, 2),
        recurrent,
    ),
    "output_2x2": lambda: under(
        model_parallel({**PAIR, ".*up/output": ("batch", None)}, 2, 2), mlp
    ),
    "there_and_back": there_and_back,
}


def run(name):
    """Runs one combination after seeding, as a fresh script would."""
    keras.utils.set_random_seed(11)
    return COMBINATIONS[name]()


def main(folder, *names):
    """Writes the numbers of each combination from a process of its own."""
    if len(names) == 1:
        np.savez(pathlib.Path(folder, names[0]), **run(*names))
        return
    # These import what the children would otherwise, each for itself.
    keras.utils.set_random_seed(0)
    keras.random.uniform((1,), seed=0)
    # Outside of the ports that sockets get by themselves.
    port = 10000 + int(os.environ.get("MASTER_PORT", "0")) % 20000
    for index, name in enumerate(names):
        # This process has imported everything, and done nothing else.
        child = os.fork()
        if not child:
            # Not through the agent of torchrun, which knows one run only.
            os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"
            os.environ["MASTER_PORT"] = str(port + index)
            main(folder, name)
            sys.exit()
        if os.waitpid(child, 0)[1]:
            sys.exit(f"{name} failed")


if __name__ == "__main__":
    # As the tests that compare with these numbers do.
    slow_tests.optimize_less()
    main(*sys.argv[1:])
