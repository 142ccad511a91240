"""Checkpoints of several processes on JAX and TensorFlow.

On torch, `torch_processes_test.py` runs these tests in each process.
"""

import os
import pathlib
import subprocess
import sys

import keras
import pytest

from integration_tests import launching

ROOT = pathlib.Path(__file__).parent.parent
BACKEND = keras.config.backend()
# What CI runs of `checkpoint_derived_test.py` and `orbax_test.py`.
QUICK = "faults or (adapters and alone) or another_mesh or streamed"


def launch(*arguments, **variables):
    """Starts a run of two processes with a device each."""
    return subprocess.Popen(
        [
            *(sys.executable, "-m", "keras_tp.launch"),
            *("--devices", "2", "--processes", "2", *map(str, arguments)),
        ],
        cwd=ROOT,
        env=launching.environment(OMP_NUM_THREADS="1", **variables),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.skipif(BACKEND == "torch", reason="see above")
def test_the_tests_of_files_in_two_processes(tmp_path):
    names = [
        "checkpoint_faults",
        "checkpoint_derived",
        "orbax",
        "streamed_values",
    ]
    is_slow = os.environ.get("KERAS_TP_SLOW") == "1"
    process = launch(
        *("integration_tests/torch_ranks.py", "-q", "-x", "--tb=short"),
        *("-k", "" if is_slow else QUICK),
        *(f"integration_tests/{name}_test.py" for name in names),
        KERAS_TP_RANK_FOLDER=str(tmp_path),
    )
    output, _ = process.communicate(timeout=1800 if is_slow else 600)
    assert process.returncode == 0, output[-4000:]
    assert (tmp_path / "rank_1.txt").exists()


@pytest.mark.slow
def test_two_runs_of_two_processes_save_and_load(tmp_path):
    """Each load finds all values of one save, of whichever run."""
    runs = [
        launch(
            "integration_tests/checkpoint_runs.py",
            *(tmp_path / "saved", first, 100),
        )
        for first in (1000, 2000)
    ]
    for process in runs:
        output, _ = process.communicate(timeout=600)
        assert process.returncode == 0, output[-4000:]
        assert "saved all" in output
    # One checkpoint, and at most the files that the other run left.
    assert len(os.listdir(tmp_path / "saved")) <= 1 + 2 + 2
