import os
import pathlib
import subprocess
import sys

import pytest

from keras_tp import startup

ROOT = pathlib.Path(__file__).parent.parent
# In the place of the real one: what it writes to stderr, and when.
TENSORFLOW = """
import os
os.write(2, b"WARNING: All log messages before absl::InitializeLog() is called "
            b"are written to STDERR\\n")
os.write(2, b"I0000 00:00:1.2    3 port.cc:153] oneDNN custom operations\\n")
os.write(2, b"E0000 00:00:1.2    3 what.cc:1] an error\\n")
print("of Python", file=__import__("sys").stderr)
if os.environ.get("FAILS"):
    raise ImportError("cannot be imported")
"""
IMPORTS = """
import importlib.util
import sys
from keras_tp import startup
assert importlib.util.find_spec("tensorflow") is not None
import tensorflow
print("afterwards", file=sys.stderr)
"""


@pytest.fixture
def stderr_of(tmp_path):
    def run(**variables):
        (tmp_path / "tensorflow.py").write_text(TENSORFLOW)
        (tmp_path / "keras_tp").mkdir(exist_ok=True)
        (tmp_path / "keras_tp" / "__init__.py").touch()
        source = (ROOT / "keras_tp" / "startup.py").read_text()
        (tmp_path / "keras_tp" / "startup.py").write_text(source)
        kept = {
            name: value
            for name, value in os.environ.items()
            if name != "TF_CPP_MIN_LOG_LEVEL"
        }
        return subprocess.run(
            [sys.executable, "-c", IMPORTS],
            # Not where the real packages are.
            cwd=tmp_path,
            env={**kept, "PYTHONPATH": str(tmp_path), **variables},
            capture_output=True,
            text=True,
        ).stderr

    return run


SHOWN = ["E0000 00:00:1.2    3 what.cc:1] an error", "of Python"]


def test_information_is_dropped_in_a_launched_process(stderr_of):
    said = stderr_of(KERAS_TP_LAUNCHER="1").splitlines()
    assert said == [*SHOWN, "afterwards"]


@pytest.mark.parametrize(
    "variables",
    [{}, {"KERAS_TP_LAUNCHER": "1", "TF_CPP_MIN_LOG_LEVEL": "0"}],
)
def test_everything_is_shown_elsewhere_or_if_asked_to(variables, stderr_of):
    said = stderr_of(**variables)
    assert "InitializeLog" in said
    assert "oneDNN" in said


def test_an_import_that_fails_says_why(stderr_of):
    said = stderr_of(KERAS_TP_LAUNCHER="1", FAILS="1")
    assert said.startswith("\n".join(SHOWN))
    assert said.endswith("ImportError: cannot be imported\n")


COMMANDS = {
    "keras-tp plan x": ["plan", "x"],
    "/bin/keras-tp": [],
    "-m keras_tp doctor": ["doctor"],
    "-m keras_tp.launch --devices 2 x.py": ["launch", "--devices", "2", "x.py"],
    "-W error -X dev -u -m keras_tp lint": ["lint"],
    "train.py -m keras_tp": None,
    "-m pytest keras_tp": None,
    "-m keras_tp.testing --backend jax": None,
    "-c pass": None,
    "": None,
}


@pytest.mark.parametrize("line, expected", COMMANDS.items())
def test_the_command(line, expected, monkeypatch):
    monkeypatch.setattr(sys, "orig_argv", ["python", *line.split()])
    assert startup.command() == expected
    is_ours = expected is not None or line.startswith("-m keras_tp.testing")
    assert startup.launches_others() == is_ours
