"""Runs of several processes: their files, memory and limits."""

import os
import re
import subprocess
import sys
import time

import keras
import pytest

from integration_tests.torch_processes_test import ROOT
from integration_tests.torch_processes_test import launch

pytestmark = pytest.mark.skipif(
    keras.config.backend() != "torch" or "RANK" in os.environ,
    reason="launches processes of torch",
)


# Twelve kernels of 8 MiB each, split over the processes.
MEMORY = """
import gc, os, pathlib, re, sys
import keras, numpy as np, torch
from keras import layers
from keras_tp import distribution as dist

MIB = 2**20
rank, folder = int(os.environ["RANK"]), pathlib.Path(sys.argv[1])
own = folder / str(rank)
own.mkdir()

def status(name):
    text = pathlib.Path("/proc/self/status").read_text()
    return int(re.search(rf"^{name}:\\s+(\\d+) kB", text, re.M)[1]) * 1024

def grown(function):
    '''Returns by how many bytes memory was higher at most, while it ran.'''
    gc.collect()
    pathlib.Path("/proc/self/clear_refs").write_text("5")
    before = status("VmRSS")
    result = function()
    return result, status("VmHWM") - before

def network(size=1448):
    inputs = keras.Input((size,))
    x = inputs
    for index in range(12):
        x = layers.Dense(size, name=f"up_{index}", use_bias=False)(x)
    return keras.Model(inputs, x)

mesh = dist.DeviceMesh((1, 2), ["batch", "model"])
layout_map = dist.LayoutMap(mesh)
layout_map[".*up_.*/kernel"] = (None, "model")
dist.set_distribution(dist.ModelParallel(layout_map=layout_map))

# What is loaded once, libraries and the like, is loaded for a small model.
keras.utils.set_random_seed(1)
small = network(16)
small.save(own / "small.keras")
small = keras.models.load_model(folder / "0" / "small.keras")
small.load_weights(folder / "0" / "small.keras")
del small

model, build = grown(network)
held = [v.value.to_local().untyped_storage().nbytes() for v in model.weights]
share = sum(held)
expected = [v.numpy()[::97].copy() for v in model.weights]
_, save = grown(lambda: model.save(own / "model.keras"))
_, weights = grown(lambda: model.save_weights(own / "model.weights.h5"))
del model
gc.collect()
path = folder / "0" / "model.keras"
model, load = grown(lambda: keras.models.load_model(path))
_, again = grown(lambda: model.load_weights(folder / "0" / "model.weights.h5"))
for variable, value in zip(model.weights, expected):
    np.testing.assert_array_equal(variable.numpy()[::97], value)
print(
    *(f"{name}={value / MIB:.1f}" for name, value in dict(
        share=share, build=build - share, save=save, weights=weights,
        load=load - share, again=again).items()),
    file=open(folder / f"{rank}.txt", "w"),
)
"""


def test_files_move_one_variable_at_a_time(tmp_path):
    """All processes gather, one writes, and none ever holds the model."""
    script = tmp_path / "memory.py"
    script.write_text(MEMORY)
    result = launch(
        str(script),
        str(tmp_path),
        devices=2,
        timeout=300,
        # Freed memory goes back at once: what is used is what is held.
        MALLOC_MMAP_THRESHOLD_="65536",
        MALLOC_TRIM_THRESHOLD_="65536",
    )
    assert result.returncode == 0, result.stderr[-3000:]
    whole = 12 * 8
    for rank in range(2):
        text = (tmp_path / f"{rank}.txt").read_text()
        measured = {
            name: float(value)
            for name, value in re.findall(r"(\w+)=(-?[\d.]+)", text)
        }
        assert measured.pop("share") == pytest.approx(whole / 2, abs=1)
        # A variable is whole while it is read or gathered, and is copied once.
        for name, peak in measured.items():
            assert peak < 4 * 8, (rank, name, text)
    # Process 1 was given a place of its own to write to.
    written = [p.name for p in (tmp_path / "0").iterdir()]
    assert sorted(written) == [
        "model.keras",
        "model.weights.h5",
        "small.keras",
    ]
    assert not list((tmp_path / "1").iterdir())


WAIT = """
import os, sys, time
import keras, numpy as np
from keras_tp import distribution as dist

mesh = dist.DeviceMesh((2,), ["model"])
layout_map = dist.LayoutMap(mesh)
layout_map[".*kernel"] = (None, "model")
dist.set_distribution(dist.ModelParallel(layout_map=layout_map))
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(4)])
if os.environ["RANK"] == "0":
    began = time.monotonic()
    try:
        model.get_weights()
    finally:
        print("waited for", round(time.monotonic() - began), "s")
time.sleep(30)
"""


def test_how_long_processes_wait_is_set(tmp_path):
    script = tmp_path / "wait.py"
    script.write_text(WAIT)
    result = launch(str(script), devices=2, timeout=120, KERAS_TP_TIMEOUT="4")
    assert result.returncode != 0
    assert "did not within 4 seconds" in result.stderr, result.stderr[-3000:]
    waited = int(re.search(r"waited for (\d+) s", result.stdout)[1])
    assert 4 <= waited < 20


@pytest.mark.parametrize("value", ["soon", "0", "-3", "inf", "nan"])
def test_a_time_to_wait_that_is_none(value):
    code = "from keras_tp.backend.torch import processes"
    result = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(ROOT), "KERAS_TP_TIMEOUT": value},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode != 0
    assert f"Received: KERAS_TP_TIMEOUT='{value}'" in result.stderr


COMPILE = """
import keras, numpy as np
from keras_tp import distribution as dist

with dist.DataParallel().scope():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(4)])
    model.compile("sgd", "mse", jit_compile=True)
    model.fit(np.ones((8, 4)), np.ones((8, 4)), verbose=0)
"""


def test_compiling_without_a_compiler(tmp_path):
    script = tmp_path / "compile.py"
    script.write_text(COMPILE)
    began = time.monotonic()
    result = launch(
        str(script), devices=2, timeout=120, CXX="/no/such/compiler"
    )
    assert time.monotonic() - began < 90
    assert result.returncode != 0
    assert "inductor, which finds no C++ compiler" in result.stderr
    assert "`jit_compile=False`" in result.stderr
    assert "CXX='/no/such/compiler'" in result.stderr
