"""The example, as a user runs it: the same losses on any mesh."""

import json
import os
import pathlib
import re
import subprocess
import sys

import keras
import numpy as np
import pytest

from integration_tests import launching

if "RANK" in os.environ:
    pytest.skip("starts its own processes", allow_module_level=True)

ROOT = pathlib.Path(__file__).parent.parent
BACKEND = keras.config.backend()
STEPS = 12
SEVERAL_PROCESSES = ("jax", "tensorflow")
# torch has a process for each device.
MESHES = [[1, 2]] if BACKEND == "torch" else [[1, 4], [2, 2]]


def _run(folder, *arguments):
    """Returns what the example logs, and what it prints."""
    log = folder / "log.json"
    command = [sys.executable, "examples/train_lm.py", "--size", "tiny"]
    command += ["--steps", str(STEPS), "--batch-size", "8", "--seed", "3"]
    command += ["--backend", BACKEND]
    result = subprocess.run(
        [*command, "--log", str(log), *arguments],
        cwd=ROOT,
        env=launching.environment(),
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert result.returncode == 0, result.stderr[-4000:]
    return json.loads(log.read_text()), result.stdout


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return _run(tmp_path_factory.mktemp("plain"), "--devices", "1")


@pytest.mark.parametrize("mesh", MESHES)
def test_losses_are_those_of_one_device(mesh, plain, tmp_path):
    expected, _ = plain
    count = mesh[0] * mesh[1]
    if mesh[0] == 1:
        log, output = _run(tmp_path, "--devices", str(count))
    else:
        log, output = _run(tmp_path, "--mesh", f"{mesh[0]}x{mesh[1]}")
    assert log["mesh"] == mesh
    assert log["devices"] == count
    assert len(log["losses"]) == STEPS
    np.testing.assert_allclose(log["losses"], expected["losses"], rtol=1e-5)
    np.testing.assert_allclose(log["val_loss"], expected["val_loss"], rtol=1e-5)
    # It did train, and on text that does not depend on the mesh.
    assert log["losses"][-1] < log["losses"][0] - 0.1
    assert log["unigram_entropy"] == expected["unigram_entropy"]
    assert len(log["sample"]) == 64
    assert log["sample"] == expected["sample"]
    # It really was split, and no weight was gathered.
    assert log["collectives"]["all_gather"] == [0, 0]
    assert log["collectives"]["all_reduce"][0] > 0
    _check_output(output, log)
    assert re.search(rf"cpu:{count - 1}\b", output)
    # One process prints.
    assert output.count("Sharding of byte_lm") == 1
    assert re.search(r"\(256, 64\).*\('model', None\)", output)


@pytest.mark.skipif(
    BACKEND not in SEVERAL_PROCESSES, reason="processes are devices there"
)
def test_two_processes(plain, tmp_path):
    expected, _ = plain
    log, output = _run(tmp_path, "--mesh", "2x2", "--processes", "2")
    np.testing.assert_allclose(log["losses"], expected["losses"], rtol=1e-5)
    np.testing.assert_allclose(log["val_loss"], expected["val_loss"], rtol=1e-5)
    assert log["collectives"]["all_gather"] == [0, 0]
    _check_output(output, log)
    assert output.count("Sharding of byte_lm") == 1


def test_one_device_is_plain_keras(plain):
    log, output = plain
    assert log["mesh"] == [1, 1]
    assert set(map(tuple, log["collectives"].values())) == {(0, 0)}
    _check_output(output, log)
    assert "no distribution" in output
    assert "cpu:1" not in output


def test_a_mesh_that_is_not_the_devices_is_refused(tmp_path):
    result = subprocess.run(
        [sys.executable, "examples/train_lm.py", "--mesh=2x3", "--devices=4"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.returncode == 2
    assert "mesh of 2x3 does not have 4 devices" in result.stderr


def _check_output(output, log):
    assert "Sharding of byte_lm" in output
    count, _ = log["collectives"]["all_reduce"]
    assert re.search(rf"all_reduce\W+{count}\b", output), output[-2000:]
    assert f"Generated: {bytes(log['sample'][32:])}" in output
    for value in (log["val_loss"], log["unigram_entropy"]):
        assert f"{value:.4f} nats per byte" in output
