"""Runs that are killed go on: on more devices, on fewer, on other backends."""

import json
import pathlib
import shutil
import subprocess
import sys

import keras
import numpy as np
import pytest

from integration_tests import launching

ROOT = pathlib.Path(__file__).parent.parent
# Name -> backend, devices, processes.
RUNS = {
    "jax 4": ("jax", 4, 1),
    "jax 2": ("jax", 2, 1),
    "jax 8": ("jax", 8, 1),
    "jax 2 x 2": ("jax", 4, 2),
    "tensorflow 4": ("tensorflow", 4, 1),
    "tensorflow 2": ("tensorflow", 2, 1),
    "tensorflow 8": ("tensorflow", 8, 1),
    "tensorflow 2 x 2": ("tensorflow", 4, 2),
    "torch 4": ("torch", 4, 4),
    "torch 2": ("torch", 2, 2),
    "torch 1": ("torch", 1, 1),
}
DROPOUT = 0.2

if keras.config.backend() != "jax":
    pytest.skip("starts every backend by itself", allow_module_level=True)


def run(name, mode, folder, rate):
    backend, devices, processes = RUNS[name]
    return subprocess.run(
        [
            *(sys.executable, "-m", "keras_tp.launch"),
            *("--devices", str(devices), "--processes", str(processes)),
            *("integration_tests/killed_runs.py", mode, folder, str(rate)),
        ],
        cwd=ROOT,
        env=launching.environment(KERAS_BACKEND=backend, OMP_NUM_THREADS="1"),
        capture_output=True,
        text=True,
        timeout=600,
    )


def compare(first, others, folder, rate=0, mode="killed", start="1, 2"):
    """Kills a run, and compares those that go on with one that was not."""
    result = run(first, mode, folder, rate)
    assert result.returncode != 0
    assert not (folder / "resumed.json").exists(), result.stderr
    expected = json.loads((folder / "whole.json").read_text())
    for name in others:
        own = folder / name.replace(" ", "_")
        own.mkdir()
        shutil.copytree(
            folder / "backup.safetensors", own / "backup.safetensors"
        )
        result = run(name, "resumed", own, rate)
        assert result.returncode == 0, f"{name}: {result.stderr[-4000:]}"
        found = json.loads((own / "resumed.json").read_text())
        steps = list(expected)
        assert list(found) == steps[steps.index(start) :], name
        for step, numbers in found.items():
            np.testing.assert_allclose(
                numbers, expected[step], rtol=1e-5, err_msg=f"{name}: {step}"
            )


def test_on_fewer_devices_of_another_backend(tmp_path):
    compare("jax 2 x 2", ["torch 2"], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    "first", ["jax 4", "jax 2 x 2", "tensorflow 4", "torch 4"]
)
def test_everywhere(first, tmp_path):
    compare(first, RUNS, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    "first", ["jax 4", "jax 2 x 2", "tensorflow 4", "torch 4"]
)
def test_with_dropout_and_shuffling_on_other_devices(first, tmp_path):
    own = first.partition(" ")[0]
    others = [name for name in RUNS if name.startswith(own)]
    compare(first, others, tmp_path, DROPOUT)


@pytest.mark.slow
@pytest.mark.parametrize(
    "first", ["jax 4", "jax 2 x 2", "tensorflow 2 x 2", "torch 2"]
)
def test_a_kill_in_a_save(first, tmp_path):
    # The first backup holds two batches.
    compare(first, [first], tmp_path, 0, "killed_in_a_save", "0, 2")
