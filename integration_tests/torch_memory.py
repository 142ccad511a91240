"""Builds a large model in every process and writes what memory that took.

    python -m keras_tp.launch --devices 2 integration_tests/torch_memory.py OUT

A script, because what other tests leave in a process would hide growth. Each
process writes `OUT/<index>.json`, in bytes.
"""

import json
import os
import pathlib
import sys

import keras
from keras import layers

from keras_tp import distribution as dist

# Kernels of 32 MiB, 256 MiB in all.
FEATURES = 2048
HIDDEN = 4096
PAIRS = 4


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
    main(sys.argv[1])
