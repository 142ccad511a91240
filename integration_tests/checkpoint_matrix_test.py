"""Checkpoints of each backend and number of processes load on each other."""

import pathlib
import subprocess
import sys

import keras
import pytest

from integration_tests import launching
from integration_tests.slow_tests import SLOW

ROOT = pathlib.Path(__file__).parent.parent
# Name -> backend, devices, processes.
RUNS = {
    "jax 4": ("jax", 4, 1),
    "jax 2 x 2": ("jax", 4, 2),
    "jax 1": ("jax", 1, 1),
    "tensorflow 4": ("tensorflow", 4, 1),
    "tensorflow 2 x 2": ("tensorflow", 4, 2),
    "tensorflow 1": ("tensorflow", 1, 1),
    "torch 2": ("torch", 2, 2),
    "torch 4": ("torch", 4, 4),
    "torch 1": ("torch", 1, 1),
}
# What CI runs.
QUICK = ["jax 4", "tensorflow 4", "torch 2"]

if keras.config.backend() != "jax":
    pytest.skip("starts every backend by itself", allow_module_level=True)


def run(name, *arguments):
    backend, devices, processes = RUNS[name]
    result = subprocess.run(
        [
            *(sys.executable, "-m", "keras_tp.launch"),
            *("--devices", str(devices), "--processes", str(processes)),
            *("integration_tests/checkpoint_matrix.py", *map(str, arguments)),
        ],
        cwd=ROOT,
        env=launching.environment(KERAS_BACKEND=backend, OMP_NUM_THREADS="1"),
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert result.returncode == 0, f"{name}: {result.stderr[-4000:]}"
    assert f"{arguments[0]}: {len(arguments) - 1}" in result.stdout


def test_each_loads_the_checkpoints_of_all(tmp_path):
    names = RUNS if SLOW else QUICK
    folders = {
        name: tmp_path / f"{name.replace(' ', '_')}.safetensors"
        for name in names
    }
    for name, folder in folders.items():
        run(name, "save", folder)
    for name in names:
        # CI shows the own checkpoint of each backend in other tests.
        others = [f for n, f in folders.items() if SLOW or n != name]
        run(name, "load", *others)
