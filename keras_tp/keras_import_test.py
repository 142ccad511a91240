import importlib.util
import os
import pathlib
import subprocess
import sys

import keras
import pytest

from keras_tp import keras_import

ROOT = pathlib.Path(__file__).parent.parent


@pytest.fixture
def run(tmp_path):
    """Returns a function that runs Python without one of the backends."""

    def run(missing, *arguments, **variables):
        (tmp_path / f"{missing}.py").write_text(
            f"raise ModuleNotFoundError('No module', name='{missing}')"
        )
        kept = {
            name: value
            for name, value in os.environ.items()
            if name != "KERAS_BACKEND"
        }
        variables = {
            "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)]),
            # Without a configuration file, which may name a backend.
            "KERAS_HOME": str(tmp_path),
            **variables,
        }
        return subprocess.run(
            [sys.executable, *arguments],
            cwd=tmp_path,
            env={**kept, **variables},
            capture_output=True,
            text=True,
        )

    return run


@pytest.mark.parametrize("name", keras_import.BACKENDS)
def test_a_backend_that_is_not_installed(run, name):
    done = run(name, "-c", "import keras_tp", KERAS_BACKEND=name)
    assert done.returncode == 1
    said = done.stderr.splitlines()[-1]
    assert f"pip install 'keras_tp[{name}]'" in said
    assert "by the environment variable KERAS_BACKEND" in said
    # Not the traceback of Keras, too.
    assert done.stderr.count("Traceback") == 1


def test_the_default_backend_is_not_installed(run):
    """As in an environment with JAX alone, or with torch alone."""
    installed = [
        name
        for name in ("jax", "torch")
        if importlib.util.find_spec(name) is not None
    ]
    settings = " or ".join(f"KERAS_BACKEND={name}" for name in installed)
    for command in (
        ["keras_tp", "--help"],
        ["keras_tp.launch", "--devices", "2", "train.py"],
    ):
        done = run("tensorflow", "-m", *command)
        assert done.returncode == 1
        assert done.stderr == (
            "keras_tp: error: Keras is set to the backend 'tensorflow' (the "
            "environment variable KERAS_BACKEND is not set), which is not "
            f"installed. To use a backend that is installed, set {settings}. "
            "To install 'tensorflow', run `pip install "
            "'keras_tp[tensorflow]'`.\n"
        )


def test_no_backend_is_installed(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert keras_import._message("tensorflow").endswith(
        "run `pip install 'keras_tp[tensorflow]'`; the same works for 'jax' "
        "and 'torch'."
    )


def test_the_script_chooses_a_backend_and_the_default_is_missing(run, tmp_path):
    own = keras.config.backend()
    chosen = "jax" if own == "tensorflow" else own
    (tmp_path / "train.py").write_text(
        f'import os\nos.environ["KERAS_BACKEND"] = "{chosen}"\n'
        "import keras\nprint(keras.config.backend())\n"
    )
    launched = ("-m", "keras_tp.launch", "--devices", "1", "train.py")
    done = run("tensorflow", *launched)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{chosen}\n"
