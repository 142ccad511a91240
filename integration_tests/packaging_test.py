"""What a wheel has."""

import pathlib
import subprocess
import sys

import keras
import pytest

ROOT = pathlib.Path(__file__).parent.parent

pytestmark = pytest.mark.skipif(
    keras.config.backend() != "jax", reason="the same on each backend"
)


def test_a_wheel_has_all_modules_and_only_the_suite_of_tests(tmp_path):
    pytest.importorskip("setuptools")
    subprocess.run(
        [sys.executable, "setup.py", "-q", "build_py", "-d", str(tmp_path)],
        cwd=ROOT,
        check=True,
        capture_output=True,
        timeout=120,
    )
    ends = ".py", ".css", ".js", ".ipynb"

    def files(root, folder):
        found = (root / folder).rglob("*")
        return {p.relative_to(root) for p in found if p.suffix in ends}

    built, sources = files(tmp_path, "."), files(ROOT, "keras_tp")
    suite = pathlib.Path("keras_tp", "testing")
    tests = {
        path
        for path in sources
        if path.name.endswith("_test.py") or path.name == "conftest.py"
        if path.parent != suite
    }
    assert len(tests) > 50
    plugin = suite / "pytest_plugin" / "__init__.py"
    installed = pathlib.Path("keras_tp_pytest", "__init__.py")
    assert built - {installed} == sources - tests - {plugin}
    assert built > {installed, suite / "training_test.py"}
