"""Compiles two blocks ahead of time, and says which collectives overlap.

    pip install '.[jax,ahead]'
    JAX_PLATFORMS=cpu python benchmarks/overlap.py --targets h100,v5e

A collective is asynchronous if computations lie between its start and its end
in the schedule of the compiled program. Hidden is the share of the
communication time that these take, by published speeds: nothing is run.
"""

import argparse
import os

os.environ["KERAS_BACKEND"] = "jax"

import keras
from rich.console import Console
from rich.table import Table

from keras_tp import distribution

DEVICES = 8
LENGTH, HIDDEN, HEADS, VOCABULARY, BATCH_SIZE = 2048, 4096, 32, 32000, 8
LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
# Name -> shape of the mesh, data x model, and arguments of `TensorParallel`.
WAYS = {
    "tensor parallel": ((1, 8), {}),
    "and sequence parallel": ((1, 8), {"sequence_parallel": True}),
    "with data parallel": ((2, 4), {}),
    "with FSDP": ((2, 4), {"fully_shard": True}),
    "with both": ((2, 4), {"fully_shard": True, "sequence_parallel": True}),
    "FSDP alone": ((8, 1), {"fully_shard": True}),
}


def build():
    """Returns two blocks between an embedding and a head."""
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy("mixed_bfloat16")
    try:
        tokens = keras.Input((LENGTH,), dtype="int32")
        x = keras.layers.Embedding(VOCABULARY, HIDDEN)(tokens)
        for _ in range(2):
            y = keras.layers.LayerNormalization()(x)
            x += keras.layers.MultiHeadAttention(HEADS, HIDDEN // HEADS)(
                y, y, use_causal_mask=True
            )
            y = keras.layers.LayerNormalization()(x)
            y = keras.layers.Dense(4 * HIDDEN, activation="gelu")(y)
            x += keras.layers.Dense(HIDDEN)(y)
        x = keras.layers.LayerNormalization()(x)
        return keras.Model(tokens, keras.layers.Dense(VOCABULARY)(x))
    finally:
        keras.config.set_dtype_policy(before)


def report_of(way, target):
    """Returns the report of `compile_for` for one way to split."""
    shape, arguments = WAYS[way]
    devices = [f"gpu:{i}" for i in range(DEVICES)]
    mesh = distribution.DeviceMesh(shape, ["batch", "model"], devices)
    parallel = distribution.TensorParallel(
        mesh, batch_dim_name="batch", **arguments
    )
    return distribution.compile_for(
        build, parallel, target, DEVICES, batch_size=BATCH_SIZE, loss=LOSS
    )


def main():
    """Prints a table, one row for each way and target."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--targets", default="h100,v5e")
    parser.add_argument("--ways", default=",".join(WAYS))
    options = parser.parse_args()
    table = Table("way", "data x model", "target", "asynchronous", "hidden")
    for target in options.targets.split(","):
        for way in options.ways.split(","):
            report = report_of(way, target)
            found = report.collectives.values()
            beside = sum(kind["beside"] for kind in found)
            count = sum(kind["operations"] for kind in found)
            seconds = report.seconds
            hidden = 1 - seconds["exposed"] / seconds["communication"]
            table.add_row(
                way,
                "{} x {}".format(*WAYS[way][0]),
                target,
                f"{beside} of {count}",
                f"{hidden:.0%}",
            )
    Console(width=100).print(table)


main()
