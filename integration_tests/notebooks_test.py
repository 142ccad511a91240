"""The notebooks are those of their scripts, and their cells run."""

import os
import re

import keras
import pytest

from integration_tests import notebooks

BACKEND = keras.config.backend()
IS_UPDATE = os.environ.get("KERAS_TP_UPDATE_NOTEBOOKS") == "1"
# Pages and pictures in an output: what GitHub still shows.
LARGEST = 300 * 2**10


def _check_first_model(output):
    for index in range(4):
        assert re.search(rf"cpu:{index}: 215\.9 of 845\.5 KiB", output)
    assert "Sharding plan of counter" in output
    assert "<div class='ktp" in output
    assert "predicted: {'all_reduce': (count=10, bytes=1310720)}" in output
    # It has learned to count.
    given, predicted = re.findall(
        r"(?:given|predicted): +\[([\d\s]+)\]", output
    )
    given, predicted = (text.split() for text in (given, predicted))
    assert len(given) == 16
    assert given[1:] == predicted[:-1]


def _check_custom_layouts(output):
    assert "The pattern 'up/bais' of the LayoutMap matches no var" in output
    assert "up/bias: replicated; ('model',) would save 768 B" in output
    assert output.count("head/kernel: replicated") == 2
    assert "head/kernel" in output and "(None, None, 'model')" in output
    assert "'all_reduce': (count=1, bytes=8192)" in output
    assert "'all_gather': (count=0, bytes=0)" in output
    assert re.search(r"\['\w.*index\.json", output)


def _check_torch_processes(output):
    assert "Each of 2 devices holds 194.27 KiB." in output
    assert "All variables together have 387.77 KiB." in output
    assert "'all_reduce': (count=1, bytes=32768)" in output
    assert "<div class='ktp" in output
    # One process prints.
    assert output.count("Sharding of functional") == 1


CHECKS = {
    "first_model": _check_first_model,
    "custom_layouts": _check_custom_layouts,
    "torch_processes": _check_torch_processes,
}
# The first backend is that of the stored outputs. CI runs one notebook, which
# is quick, on one backend; `shell/test_docs.sh` runs all.
BACKENDS = {
    "first_model": ("jax", "tensorflow"),
    "custom_layouts": ("jax", "tensorflow"),
    "torch_processes": ("torch",),
}
IN_CI = ("custom_layouts", "jax")
pytestmark = pytest.mark.skipif(
    "RANK" in os.environ, reason="starts its own processes"
)
once = pytest.mark.skipif(BACKEND != "jax", reason="the same on each backend")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            name,
            marks=[]
            if (name, BACKEND) == IN_CI or IS_UPDATE
            else [pytest.mark.slow],
        )
        for name, backends in BACKENDS.items()
        if BACKEND in backends
    ],
)
def test_cells_run(name, tmp_path):
    notebook = notebooks.from_script(name)
    notebooks.run(notebook, tmp_path, BACKEND)
    output = notebooks.output_of(notebook)
    CHECKS[name](output)
    errors = notebooks.warnings_of(notebook)
    assert "Warning" not in errors, errors
    if IS_UPDATE and BACKEND == BACKENDS[name][0]:
        notebooks.write(name, notebook)


@once
@pytest.mark.parametrize("name", CHECKS)
def test_a_notebook_is_its_script(name):
    """If not: KERAS_TP_UPDATE_NOTEBOOKS=1, as `notebooks.py` says."""
    found, expected = notebooks.stored(name), notebooks.from_script(name)
    assert [(cell.cell_type, cell.source) for cell in found.cells] == [
        (cell.cell_type, cell.source) for cell in expected.cells
    ]


@once
@pytest.mark.parametrize("name", CHECKS)
def test_stored_outputs(name):
    """What GitHub shows has what a run prints, and tells no machine."""
    path = notebooks.EXAMPLES / f"{name}.ipynb"
    found = notebooks.stored(name)
    CHECKS[name](notebooks.output_of(found))
    assert not notebooks.warnings_of(found)
    assert path.stat().st_size < LARGEST
    assert not re.search(r"/tmp/|/home/|/root/|/work/", path.read_text())


@once
def test_every_notebook_has_a_script():
    found = {path.stem for path in notebooks.EXAMPLES.rglob("*.ipynb")}
    assert found == set(CHECKS)
