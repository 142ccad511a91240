import os
import pathlib
import subprocess
import sys

import keras
import pytest

ROOT = pathlib.Path(__file__).parent.parent
SCRIPT = """
import sys
from helper import NAME
from keras_tp import distribution as dist
if __name__ == "__main__":
    print(NAME, sys.argv[1:], dist.list_devices())
"""


def launch(*args, **env):
    return subprocess.run(
        [sys.executable, "-m", "keras_tp.launch", *args],
        env={**os.environ, "PYTHONPATH": str(ROOT), **env},
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.fixture
def script(tmp_path):
    (tmp_path / "helper.py").write_text("NAME = 'beside the script'\n")
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return str(path)


def test_a_script_runs_on_the_devices_asked_for(script):
    result = launch("--devices", "3", script, "--devices", "x")
    assert result.returncode == 0, result.stderr
    # On torch a device is a process, and each of them runs the script.
    times = 3 if keras.config.backend() == "torch" else 1
    assert result.stdout.splitlines() == times * [
        "beside the script ['--devices', 'x'] ['cpu:0', 'cpu:1', 'cpu:2']"
    ]


def test_the_exit_code_and_the_error_are_the_scripts(tmp_path):
    path = tmp_path / "fails.py"
    path.write_text("import sys\nsys.exit(7)\n")
    result = launch("--devices", "2", str(path))
    if keras.config.backend() == "torch":
        # torchrun's own, which reports that of the script.
        assert result.returncode == 1
        assert "exitcode  : 7" in result.stderr
    else:
        assert result.returncode == 7
    path.write_text("raise RuntimeError('from the script')\n")
    result = launch("--devices", "2", str(path))
    assert result.returncode == 1
    assert "from the script" in result.stderr


def test_bad_arguments(script):
    result = launch("--devices", "0", script)
    assert result.returncode == 2
    assert "at least 1" in result.stderr
    assert launch(script).returncode == 2


def test_a_backend_that_cannot_distribute(script):
    result = launch("--devices", "2", script, KERAS_BACKEND="numpy")
    assert result.returncode == 1
    assert "Supported backends: 'jax'" in result.stderr
