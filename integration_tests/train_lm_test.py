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
PROMPTS = ("    def __init__(", "import ", "        return ")
# torch has a process for each device.
MESHES = [[1, 2]] if BACKEND == "torch" else [[1, 4], [2, 2]]


def _train(folder, *arguments, timeout=200):
    """Returns what the example logs, and what it prints."""
    log = folder / "log.json"
    output = launching.output_of(
        *("examples/train_lm.py", "--backend", BACKEND, "--log", str(log)),
        *("--output", str(folder), *arguments),
        timeout=timeout,
    )
    return json.loads(log.read_text()), output


def _run(folder, *arguments):
    """Trains for a few steps."""
    few = ("--size", "tiny", "--steps", str(STEPS), "--batch-size", "8")
    return _train(folder, *few, "--seed", "3", *arguments)


def _files(folder):
    """Returns the page of the plan, and the table of the devices' parts."""
    page, table = (folder / name for name in ("plan.html", "sharding.txt"))
    return page.read_text(), table.read_text()


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plain")
    return *_run(folder, "--devices", "1"), folder


@pytest.mark.parametrize("mesh", MESHES)
def test_losses_are_those_of_one_device(mesh, plain, tmp_path):
    expected, *_ = plain
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
    assert [len(text) for text in log["samples"]] == [64] * 3
    assert log["samples"] == expected["samples"]
    # It really was split, and no weight was gathered.
    assert log["collectives"]["all_gather"] == [0, 0]
    assert log["collectives"]["all_reduce"][0] > 0
    _check_output(output, log, tmp_path)
    page, table = _files(tmp_path)
    assert f"Each of {count} devices holds" in table
    assert re.search(r"\(256, 64\).*\('model', None\)", table)
    assert "row-parallel: one all-reduce of the output" in page


@pytest.mark.skipif(
    BACKEND not in SEVERAL_PROCESSES, reason="processes are devices there"
)
def test_two_processes(plain, tmp_path):
    expected, *_ = plain
    log, output = _run(tmp_path, "--mesh", "2x2", "--processes", "2")
    np.testing.assert_allclose(log["losses"], expected["losses"], rtol=1e-5)
    np.testing.assert_allclose(log["val_loss"], expected["val_loss"], rtol=1e-5)
    assert log["collectives"]["all_gather"] == [0, 0]
    _check_output(output, log, tmp_path)


def test_one_device_is_plain_keras(plain):
    log, output, folder = plain
    assert log["mesh"] == [1, 1]
    assert set(map(tuple, log["collectives"].values())) == {(0, 0)}
    _check_output(output, log, folder)
    _, table = _files(folder)
    assert "no distribution" in table
    assert "devices holds" not in table


@pytest.mark.slow
def test_the_text_of_the_demo_has_words(tmp_path):
    """The command of `shell/demo.sh`, which trains for longer."""
    log, _ = _train(tmp_path, "--devices", "2", timeout=900)
    # Less than Python's source has without any context, by far.
    assert log["val_loss"] < 2.1 < log["unigram_entropy"] - 1
    written = " ".join(bytes(text).decode() for text in log["samples"])
    assert "self" in re.findall(r"[a-z]+", written), written


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


def _check_output(output, log, folder):
    """Checks the summary, which one process prints."""
    assert output.count("\nloss (step) ") == 1, output
    first, last = log["losses"][0], log["losses"][-1]
    assert f" {first:.2f} (1), " in output
    assert f", {last:.2f} ({STEPS})\n" in output
    assert re.search(r"^ +█[▁▂▃▄▅▆▇█]{10}[▁▂]$", output, re.MULTILINE)
    for value in (log["val_loss"], log["unigram_entropy"]):
        assert f"{value:.4f}" in output
    # What is counted is what is predicted.
    count, _ = log["collectives"]["all_reduce"]
    assert sum(log["predicted_all_reduces"].values()) == count
    assert f"{count} counted in a step, {count} predicted" in output
    others = {k: v for k, v in log["collectives"].items() if k != "all_reduce"}
    assert set(map(tuple, others.values())) == {(0, 0)}
    assert "0 counted, 0 predicted" in output
    # A device has its share, and a little that is whole.
    held, total = map(
        float,
        re.search(r"([\d.]+) MiB on each .* hold ([\d.]+)", output).groups(),
    )
    share = 1 / log["mesh"][1]
    assert share * total <= held < (share + 0.1) * total + 0.01
    for text in log["samples"]:
        text = bytes(text).decode("latin-1")
        assert repr(text) in output
        prompt = next(p for p in PROMPTS if text.startswith(p))
        assert re.search("[A-Za-z]", text[len(prompt) :]), text
    for path, words in zip(
        (folder / "plan.html", folder / "sharding.txt"),
        ("<!doctype html>", "Sharding of byte_lm"),
    ):
        assert str(path) in output
        assert words in path.read_text()
    # The table is not in the terminal.
    assert "Sharding of byte_lm" not in output
