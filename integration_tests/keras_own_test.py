"""Keras's own distribution tests, with keras_tp's names in Keras's place."""

import importlib.util
import pathlib
import subprocess
import sys

import keras
import pytest

from integration_tests import launching

# Module that the wheel of Keras ships -> what is replaced in its source.
FRONT = {
    "from keras.src.distribution import distribution_lib": (
        "from keras_tp.distribution import distribution_lib"
    ),
    "from keras.src.backend import distribution_lib as backend_dlib": (
        "from keras_tp.backend import distribution_lib as backend_dlib"
    ),
}
MODULES = {
    "keras.src.distribution.distribution_lib_test": FRONT,
    "keras.src.backend.jax.distribution_lib_test": FRONT,
}
# Test id -> why it cannot pass with keras_tp's names.
_ARGUMENTS = "JAX is also given time limits, and the processes meet before"
SKIPPED = {
    f"JaxDistributionLibTest::test_initialize_with_{name}": _ARGUMENTS
    for name in ("all_job_addresses", "coordinator_address")
}


@pytest.mark.skipif(
    keras.config.backend() != "jax", reason="Keras tests this on JAX only"
)
@pytest.mark.parametrize("module", MODULES)
def test_keras_own_tests_pass(module, tmp_path):
    source = pathlib.Path(importlib.util.find_spec(module).origin).read_text()
    for old, new in MODULES[module].items():
        assert source.count(old) == 1, f"{old!r} is not in {module}"
        source = source.replace(old, new)
    copy = tmp_path / "keras_own_copy_test.py"
    copy.write_text(source)
    # Some of these tests clear `os.environ`, and with it the device count, so
    # the devices have to be made first; Keras's own conftest does the like.
    (tmp_path / "conftest.py").write_text("import jax\n\njax.devices()\n")
    deselect = [f"--deselect={copy.name}::{test}" for test in SKIPPED]
    command = [sys.executable, "-m", "pytest", "-q", "--no-header", "-rs"]
    result = subprocess.run(
        [*command, *deselect, copy.name],
        cwd=tmp_path,
        env=launching.environment(devices=8),
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert result.returncode == 0, result.stdout[-6000:] + result.stderr[-2000:]
    assert "skipped" not in result.stdout, result.stdout[-2000:]
    assert "passed" in result.stdout, result.stdout[-2000:]
