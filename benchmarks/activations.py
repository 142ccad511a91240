"""Compares a plan's estimate of activations with XLA's figure, on JAX.

    python benchmarks/activations.py --devices 4

The plan counts what the forward pass keeps for the backward pass, each tensor
once. XLA reports, of the compiled train step, the most bytes on one device of
all that is neither argument nor result (`memory_analysis`): also gradients,
those of activations among them, and what it computes with on the way.
"""

import argparse
import os
import pathlib
import sys

os.environ["KERAS_BACKEND"] = "jax"
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

from keras_tp import launch

BATCH_SIZE = 32
LENGTH = 64
WIDTH = 256
VOCABULARY = 512


def parse_options():
    """Returns the options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--devices", type=int, default=4)
    parser.add_argument("--launched", action="store_true")
    return parser.parse_args()


OPTIONS = parse_options()
if not OPTIONS.launched:
    # The devices have to exist before the backend starts.
    script = str(pathlib.Path(__file__).resolve())
    launch.main(
        ["--devices", str(OPTIONS.devices), script, *sys.argv[1:], "--launched"]
    )
    sys.exit()

import keras
import numpy as np
from keras import layers
from rich.console import Console
from rich.table import Table

from keras_tp import distribution
from keras_tp.backend.jax import collective_counter


def perceptron():
    """Four pairs of matrices."""
    inputs = keras.Input((WIDTH,))
    x = inputs
    for _ in range(4):
        x = layers.Dense(4 * WIDTH, activation="relu")(x)
        x = layers.Dense(WIDTH)(x)
    return keras.Model(inputs, x)


def gated():
    """Two gated feed-forward blocks."""
    inputs = keras.Input((LENGTH, WIDTH))
    x = inputs
    for _ in range(2):
        y = layers.LayerNormalization()(x)
        gate = layers.Dense(4 * WIDTH, activation="silu")(y)
        y = gate * layers.Dense(4 * WIDTH)(y)
        x = x + layers.Dense(WIDTH)(y)
    return keras.Model(inputs, x)


def transformer():
    """Two blocks of attention and feed-forward."""
    inputs = keras.Input((LENGTH,), dtype="int32")
    x = layers.Embedding(VOCABULARY, WIDTH)(inputs)
    for _ in range(2):
        y = layers.LayerNormalization()(x)
        x = x + layers.MultiHeadAttention(8, WIDTH // 8)(y, y)
        y = layers.LayerNormalization()(x)
        y = layers.Dense(4 * WIDTH, activation="gelu")(y)
        x = x + layers.Dense(WIDTH)(y)
    return keras.Model(inputs, x)


def convolutions():
    """Four convolutions."""
    inputs = keras.Input((32, 32, 3))
    x = inputs
    for filters in (32, 64, 64, 128):
        x = layers.Conv2D(filters, 3, padding="same", activation="relu")(x)
    x = layers.GlobalAveragePooling2D()(x)
    return keras.Model(inputs, layers.Dense(8)(x))


def measure(build):
    """Returns bytes on one device: the plan's activations, XLA's figure."""
    keras.utils.clear_session()
    mesh = distribution.DeviceMesh((1, OPTIONS.devices), ["batch", "model"])
    plan = distribution.plan_sharding(build, mesh)
    with plan.distribution().scope():
        model = build()
        model.compile(keras.optimizers.SGD(0.01), "mse")
        x = np.zeros((BATCH_SIZE, *model.input.shape[1:]), model.input.dtype)
        y = np.zeros((BATCH_SIZE, *model.output.shape[1:]), "float32")
        compiled = collective_counter.compile_step(model, x, y)
    predicted = plan.memory(BATCH_SIZE, LENGTH)["activations"]
    return predicted, compiled.memory_analysis().temp_size_in_bytes


def main():
    """Prints the table."""
    table = Table(title=f"MiB on each of {OPTIONS.devices} devices")
    table.add_column("model")
    for heading in ("plan", "XLA", "plan / XLA", "error"):
        table.add_column(heading, justify="right")
    for build in (perceptron, gated, transformer, convolutions):
        predicted, found = measure(build)
        table.add_row(
            build.__name__,
            f"{predicted / 2**20:.2f}",
            f"{found / 2**20:.2f}",
            f"{predicted / found:.2f}",
            f"{predicted / found - 1:+.0%}",
        )
    Console(width=80).print(table)


if __name__ == "__main__":
    main()
