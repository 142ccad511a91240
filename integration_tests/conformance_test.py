"""The suite that any backend has to pass, run as its users run it."""

import os
import pathlib
import re
import shutil
import subprocess
import sys

import keras
import pytest

from integration_tests import launching
from keras_tp.backend import current
from keras_tp.testing import declarations

ROOT = pathlib.Path(__file__).parent.parent
EXAMPLE = ROOT / "examples" / "backend"
BACKEND = keras.config.backend()
# The example runs in processes of its own: with the backend whose tests take
# the least time.
of_the_example = pytest.mark.skipif(
    BACKEND != "torch", reason="once, beside the tests of torch"
)


def run_suite(backend, folder, *arguments, path=()):
    """Runs the suite.

    Returns:
        Tuple: its exit status, its output, and a dict of `"passed"`,
        `"failed"` and `"skipped"` to a count.
    """
    command = [sys.executable, "-m", "pytest", "--pyargs", "keras_tp.testing"]
    environment = launching.environment(
        PYTHONPATH=os.pathsep.join(map(str, [*path, ROOT])),
        JAX_DISABLE_MOST_OPTIMIZATIONS="1",
        OMP_NUM_THREADS="1",
    )
    # The suite chooses it.
    environment.pop("KERAS_BACKEND", None)
    ended = subprocess.run(
        [*command, "--backend", backend, *arguments],
        env=environment,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=900,
    )
    out = ended.stdout + ended.stderr
    last = ended.stdout.strip().splitlines()[-1:]
    found = re.findall(r"(\d+) (passed|failed|skipped)", "".join(last))
    return ended.returncode, out, {kind: int(n) for n, kind in found}


def test_this_backend(tmp_path):
    code, out, counts = run_suite(BACKEND, tmp_path)
    assert code == 0, out
    assert counts["passed"] >= 95, out
    skips = [li for li in out.splitlines() if li.startswith("SKIPPED")]
    assert all("declared: " in line for line in skips)
    declared = declarations.cannot(BACKEND)
    assert counts.get("skipped", 0) >= len(declared)


@pytest.fixture
def example(tmp_path):
    """A copy of the example, installed: its folders for `PYTHONPATH`."""
    pytest.importorskip("setuptools")
    ignored = shutil.ignore_patterns("*.egg-info", "__pycache__")
    folder = tmp_path / "backend"
    shutil.copytree(EXAMPLE, folder, ignore=ignored)
    subprocess.run(
        [sys.executable, "setup.py", "-q", "egg_info"], cwd=folder, check=True
    )
    return folder


@of_the_example
def test_the_example(example, tmp_path):
    code, out, counts = run_suite("plain", tmp_path, path=[example])
    assert code == 0, out
    assert counts["passed"] >= 95, out


# What is taken from the example: a file, a text, what replaces it, and the
# tests that have to fail then.
REMOVALS = {
    "a hook": ("return [batches, *", "return [*", "do_not_divide", 1),
    "the rows for files": (", *files]", "]", "file", 2),
    "a collective": (
        "return jax.lax.psum(_only(part, axis, source), axis)",
        "return _only(part, axis, source)",
        "values_and_gradients",
        2,
    ),
    "a function": ("def why_gathered", "def why", "test_functions", 1),
}


@of_the_example
@pytest.mark.parametrize("name", REMOVALS)
def test_an_incomplete_backend_fails(name, example, tmp_path):
    old, new, tests, least = REMOVALS[name]
    changed = 0
    for path in (example / "keras_tp_plain").glob("*.py"):
        text = path.read_text()
        changed += text.count(old)
        path.write_text(text.replace(old, new))
    assert changed == 1
    code, out, counts = run_suite(
        "plain", tmp_path, "-k", tests, path=[example]
    )
    assert code != 0
    assert counts["failed"] >= least, out


def test_a_backend_that_is_not_there(tmp_path):
    code, out, _ = run_suite("nowhere", tmp_path)
    assert code != 0
    assert "There is no backend 'nowhere'" in out


@pytest.mark.parametrize("backend", current.SUPPORTED_BACKENDS)
def test_declared_tests_exist(backend):
    folder = pathlib.Path(declarations.__file__).parent
    text = "".join(path.read_text() for path in folder.glob("*_test.py"))
    for name in declarations.cannot(backend):
        assert f"def {name.partition('[')[0]}(" in text
