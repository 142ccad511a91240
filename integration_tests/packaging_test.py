"""What a wheel has, and which versions it accepts."""

import pathlib
import re
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


def test_versions_that_are_accepted_are_those_that_were_tried():
    specifiers = pytest.importorskip("packaging.specifiers")
    listed = subprocess.run(
        ["bash", "shell/lanes.sh", "list"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
    ).stdout.split()
    page = (ROOT / "docs" / "lanes.md").read_text()
    assert [lane for lane in listed if f"lanes.sh {lane}`" not in page] == []
    # Backend -> the range of its first package.
    accepted = dict(
        re.findall(
            r'^    "(jax|tensorflow|torch)": \["\1([^"]+)"',
            (ROOT / "setup.py").read_text(),
            re.MULTILINE,
        )
    )
    assert len(accepted) == 3
    for backend, text in accepted.items():
        tried = {
            lane.split("-")[1]
            for lane in listed
            if lane.startswith(f"{backend}-")
        }
        allowed = specifiers.SpecifierSet(text)
        assert set(allowed.filter(tried)) == tried, backend
        for bound in allowed:
            if bound.operator == ">=":
                lowest = f"{bound.version}.0"
                assert lowest in tried, (backend, lowest)
            else:
                major, minor = map(int, bound.version.split("."))
                newest = f"{major}.{minor - 1}."
                assert any(v.startswith(newest) for v in tried), backend
