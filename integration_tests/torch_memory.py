"""Builds a large model in every process and writes what memory that took.

    python -m keras_tp.launch --devices 2 integration_tests/torch_memory.py OUT
    python -m keras_tp.launch --devices 2 integration_tests/torch_memory.py \\
        OUT fully_sharded

The second one trains it, fully sharded.

A script, because what other tests leave in a process would hide growth. Each
process writes `OUT/<index>.json`, in bytes.
"""

import json
import os
import pathlib
import sys

import keras
import numpy as np
from keras import layers

from keras_tp import distribution as dist

# Kernels of 32 MiB, 256 MiB in all.
FEATURES = 2048
HIDDEN = 4096
PAIRS = 4
BATCH = 8


def status(name):
    """Returns a size of this process's memory from /proc, in bytes."""
    for line in pathlib.Path("/proc/self/status").read_text().splitlines():
        key, _, value = line.partition(":")
        if key == name:
            return int(value.split()[0]) * 1024
    raise KeyError(name)


def build():
    inputs = keras.Input((FEATURES,))
    x = inputs
    for index in range(PAIRS):
        x = layers.Dense(
            HIDDEN,
            kernel_initializer="truncated_normal",
            name=f"up_{index}",
        )(x)
        x = layers.Dense(FEATURES, name=f"down_{index}")(x)
    return keras.Model(inputs, x)


def train_fully_sharded(folder):
    """Writes the peak memory of three steps, and the plan's prediction."""
    mesh = dist.DeviceMesh((dist.get_device_count(), 1), ["batch", "model"])
    plan = dist.plan_sharding(build, mesh, fully_shard=True)
    with dist.TensorParallel(mesh, fully_shard=True).scope():
        # The first step of a process loads libraries.
        small = keras.Sequential([keras.Input((8,)), layers.Dense(8)])
    for model, size in ((small, 8), (None, FEATURES)):
        x = np.ones((BATCH, size), "float32")
        before = status("VmRSS")
        pathlib.Path("/proc/self/clear_refs").write_text("5")
        if model is None:
            with plan.distribution().scope():
                model = build()
        model.compile(keras.optimizers.Adam(), "mse")
        for _ in range(3):
            model.train_on_batch(x, x)
    found = {
        "peak": status("VmHWM") - before,
        "planned": plan.memory(BATCH, optimizer="adam"),
    }
    path = pathlib.Path(folder, f"{os.environ['RANK']}.json")
    path.write_text(json.dumps(found))


def main(folder):
    count = dist.get_device_count()
    layout_map = dist.LayoutMap(dist.DeviceMesh((1, count), ["batch", "model"]))
    layout_map["up_.*/kernel"] = (None, "model")
    layout_map["up_.*/bias"] = ("model",)
    layout_map["down_.*/kernel"] = ("model", None)
    layout_map.strict = True
    dist.set_distribution(dist.ModelParallel(layout_map=layout_map))
    # What the first variable loads is none of its own.
    layers.Dense(1).build((None, 1))

    before = status("VmRSS")
    # The peak is counted anew from here on.
    pathlib.Path("/proc/self/clear_refs").write_text("5")
    model = build()
    built = {"rss": status("VmRSS") - before, "peak": status("VmHWM") - before}
    model.compile(keras.optimizers.Adam(), "mse")
    model.optimizer.build(model.trainable_variables)
    slots = {"rss": status("VmRSS") - before, "peak": status("VmHWM") - before}

    report = dist.describe(model)
    found = {
        "built": built,
        "slots": slots,
        "split": {
            role: sum(
                row.bytes
                for row in report.rows
                if row.role == role and row.is_split
            )
            for role in ("weight", "slot")
        },
        "held": {
            role: {
                device: sum(
                    row.device_bytes[device]
                    for row in report.rows
                    if row.role == role and row.is_split
                )
                for device in dist.list_devices()
            }
            for role in ("weight", "slot")
        },
        "largest": max(row.bytes for row in report.rows),
    }
    path = pathlib.Path(folder, f"{os.environ['RANK']}.json")
    path.write_text(json.dumps(found))


if __name__ == "__main__":
    (main if len(sys.argv) == 2 else train_fully_sharded)(sys.argv[1])
