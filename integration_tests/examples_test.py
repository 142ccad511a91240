"""The examples run to their end, on two devices."""

import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parent.parent

pytestmark = pytest.mark.skipif(
    "RANK" in os.environ,
    reason="starts its own processes",
)


@pytest.mark.parametrize("name", ["custom_layer", "existing_model", "llama"])
def test_example(name, tmp_path):
    # It has to make its own devices, not to find those of the tests.
    env = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    result = subprocess.run(
        [
            *(sys.executable, "-m", "keras_tp.launch", "--devices", "2"),
            str(ROOT / "examples" / f"{name}.py"),
        ],
        cwd=tmp_path,
        env={**env, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr[-4000:]
    assert result.stdout
