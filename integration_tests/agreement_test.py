"""The three backends, from the same weights: the same losses."""

import json
import pathlib
import subprocess
import sys

import keras
import numpy as np
import pytest

from integration_tests import agreement
from integration_tests import harness
from integration_tests import launching

ROOT = pathlib.Path(__file__).parent.parent

if keras.config.backend() != "jax":
    pytest.skip("starts every backend by itself", allow_module_level=True)


@pytest.fixture(scope="module")
def losses(tmp_path_factory):
    """Returns the losses of each model on each backend."""
    folder = tmp_path_factory.mktemp("agreement")
    found = {}
    for backend in ("jax", "tensorflow", "torch"):
        result = subprocess.run(
            [
                *(sys.executable, "-m", "keras_tp.launch", "--devices", "2"),
                *("integration_tests/agreement.py", str(folder)),
            ],
            cwd=ROOT,
            env=launching.environment(
                KERAS_BACKEND=backend, OMP_NUM_THREADS="1"
            ),
            capture_output=True,
            text=True,
            timeout=900,
        )
        assert result.returncode == 0, result.stderr[-4000:]
        path = folder / f"losses_{backend}.json"
        found[backend] = json.loads(path.read_text())
    return found


@pytest.mark.parametrize("name", agreement.NAMES)
@pytest.mark.parametrize("backend", ["tensorflow", "torch"])
def test_losses_are_those_of_jax(backend, name, losses):
    expected, actual = losses["jax"][name], losses[backend][name]
    assert abs(expected[-1] / expected[0] - 1) > 1e-3
    part = np.max(np.abs(np.array(actual) / np.array(expected) - 1))
    harness.log_measurement("agreement", name, backend, f"{part:.1e}")
    np.testing.assert_allclose(actual, expected, rtol=1e-5)
