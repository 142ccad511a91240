"""Building a model takes the memory of its shards, and of two variables."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[3]
MIB = 2**20

SCRIPT = """
import json
import keras
from keras import layers
from keras_tp import distribution as dist


def status(name):
    # In KiB: VmRSS is the memory in use, VmHWM the most there ever was.
    for line in open("/proc/self/status"):
        if line.startswith(name):
            return int(line.split()[1]) * 1024


def build(units, count):
    model = keras.Sequential([keras.Input((units,))])
    for i in range(count):
        model.add(layers.Dense(units, use_bias=False, name=f"dense_{i}"))
    return model


mesh = dist.DeviceMesh((1, 4), ["batch", "model"], dist.list_devices())
layout_map = dist.LayoutMap(mesh)
layout_map[".*kernel"] = (None, "model")
dist.set_distribution(dist.ModelParallel(layout_map=layout_map))
# What TensorFlow sets up once is no part of a model.
build(64, 1)
before = status("VmRSS")
model = build(4096, 4)
peak = status("VmHWM")
report = dist.describe(model)
print(json.dumps([peak - before, report.total_bytes, report.device_bytes]))
"""


@pytest.mark.skipif(
    not pathlib.Path("/proc/self/status").exists(),
    reason="memory is read from /proc",
)
def test_building_a_model():
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "KERAS_TP_CPU_DEVICES": "4",
        },
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr[-2000:]
    growth, total, by_device = json.loads(result.stdout.splitlines()[-1])
    assert total == 256 * MIB
    assert by_device == {f"cpu:{i}": total // 4 for i in range(4)}
    # All four devices are in this process: their shards are the model, once.
    # A variable is made whole on the host before it is split.
    largest = 64 * MIB
    print(growth / MIB)
    assert total <= growth <= total + 2 * largest + 16 * MIB
