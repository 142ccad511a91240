"""Building a model takes the memory of its shards, and of two variables.

Both are compared with plain Keras, whose initializers need memory too.
"""

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
import sys
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
if sys.argv[1] == "split":
    dist.set_distribution(dist.ModelParallel(layout_map=layout_map))
# What TensorFlow sets up once is no part of a model.
build(64, 1)
before = status("VmRSS")
model = build(2048, 16)
peak = status("VmHWM")
report = dist.describe(model)
print(json.dumps([peak - before, report.total_bytes, report.device_bytes]))
"""


def build(how):
    """Returns the growth, the bytes of the model, and those of each device."""
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT, how],
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
    return json.loads(result.stdout.splitlines()[-1])


@pytest.mark.skipif(
    not pathlib.Path("/proc/self/status").exists(),
    reason="memory is read from /proc",
)
def test_building_a_model():
    largest, total = 16 * MIB, 256 * MIB
    growth, found, by_device = build("split")
    assert found == total
    assert by_device == {f"cpu:{i}": total // 4 for i in range(4)}
    plain, found, by_device = build("plain")
    assert found == total
    assert by_device == {"cpu:0": total}
    # All four devices are in this process: their shards are the model, once.
    # A variable is made whole on the host, and then split.
    assert total <= growth <= plain + 2 * largest
