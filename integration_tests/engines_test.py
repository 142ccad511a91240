"""Engines that start the processes: Open MPI and SLURM."""

import os
import subprocess
import sys

import keras
import pytest

from integration_tests import launching
from integration_tests.slow_tests import SLOW

BACKEND = keras.config.backend()
# What CI tries; JAX detects engines by itself.
CHECKS = {
    "jax": [],
    "tensorflow": ["losses"],
    "torch": ["killed"],
}
if SLOW:
    CHECKS = dict.fromkeys(CHECKS, ["losses", "printed", "killed"])

pytestmark = pytest.mark.skipif(
    "RANK" in os.environ, reason="starts its own processes"
)


def run(script, checks, processes):
    """Runs a script of `shell/engines`; returns the lines of its table."""
    result = subprocess.run(
        ["bash", str(launching.ROOT / "shell" / "engines" / script), BACKEND],
        env={
            **os.environ,
            "PYTHON": sys.executable,
            "PYTHONPATH": str(launching.ROOT),
            "KERAS_TP_INSTALL": "0",
            "KERAS_TP_ENGINE_PROCESSES": str(processes),
            "KERAS_TP_ENGINE_CHECKS": " ".join(checks),
        },
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    if result.stdout.startswith("skipped: "):
        pytest.skip(result.stdout)
    found = result.stdout.splitlines()
    return found[found.index("|---|---|---|---|") + 1 :]


@pytest.mark.skipif(not CHECKS[BACKEND], reason="set KERAS_TP_SLOW=1 to run it")
def test_open_mpi():
    count = 4 if SLOW else 2
    lines = run("openmpi.sh", CHECKS[BACKEND], count)
    for line, check in zip(lines, CHECKS[BACKEND], strict=True):
        assert f"| openmpi | {BACKEND} | {check} |" in line


@pytest.mark.slow
def test_slurm():
    checks = ["losses", "printed", "killed", "unaided", "cancelled", "requeued"]
    lines = run("slurm.sh", checks, 4)
    for line, check in zip(lines, checks, strict=True):
        assert f"| slurm | {BACKEND} | {check} |" in line
