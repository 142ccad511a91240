import os
import pathlib
import subprocess
import sys

import pytest

from keras_tp import keras_import

ROOT = pathlib.Path(__file__).parent.parent


@pytest.mark.parametrize("name", keras_import.BACKENDS)
def test_a_backend_that_is_not_installed(tmp_path, name):
    (tmp_path / f"{name}.py").write_text(
        f"raise ModuleNotFoundError('No module named {name}', name='{name}')"
    )
    variables = {
        "KERAS_BACKEND": name,
        "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)]),
    }
    done = subprocess.run(
        [sys.executable, "-c", "import keras_tp"],
        cwd=tmp_path,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert f"pip install 'keras_tp[{name}]'" in done.stderr.splitlines()[-1]
    assert "KERAS_BACKEND" in done.stderr
