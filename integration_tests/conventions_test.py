"""Docstrings, words, devices and symbolic tensors are as in Keras.

README.md of this folder names the row that each test shows.
"""

import ast
import pathlib
import re

import keras
import pytest
from keras import tree

import keras_tp
from integration_tests import harness
from keras_tp import distribution

PACKAGE = pathlib.Path(keras_tp.__file__).parent
SOURCES = [
    path
    for path in sorted(PACKAGE.rglob("*.py"))
    if not path.name.endswith("_test.py")
]


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: p.name)
def test_docstrings_are_keras_s(path):
    """One line that ends in a period; arguments as `name: Type. Meaning.`."""
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            continue
        text = ast.get_docstring(node)
        if text is None:
            continue
        assert re.search(r"[.:?]$", text.splitlines()[0]), node.name
        assert not re.search(r":(param|return|type)|^Parameters$", text, re.M)


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: p.name)
def test_index_and_device_not_rank_and_worker(path):
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.append(node.name)
        if isinstance(node, ast.FunctionDef):
            names += [a.arg for a in node.args.args + node.args.kwonlyargs]
        for name in names:
            assert "worker" not in name.lower(), name
            # A tensor has a rank; a process has an index.
            assert not re.fullmatch(r"\w+_rank|rank_\w+", name), name


def test_devices_and_their_count():
    devices = distribution.list_devices()
    assert len(devices) == distribution.get_device_count() > 1
    assert distribution.list_devices("cpu") == devices
    assert distribution.get_device_count("cpu") == len(devices)
    assert len(set(devices)) == len(devices)


def test_one_mesh_one_layout_one_distribution():
    """No second kind of any of them: they are Keras's by inheritance."""
    for name in ("DeviceMesh", "TensorLayout", "LayoutMap", "ModelParallel"):
        own, plain = (
            getattr(distribution, name),
            getattr(keras.distribution, name),
        )
        assert issubclass(own, plain)
    parallel = distribution.TensorParallel()
    assert isinstance(parallel, keras.distribution.ModelParallel)
    assert isinstance(parallel.device_mesh, keras.distribution.DeviceMesh)


def test_symbolic_tensors_pass():
    layout = distribution.TensorLayout(
        (None, "model"), harness.mesh(harness.fitted((1, 2)))
    )
    symbolic = {"a": keras.Input((4,)), "b": None}
    found = distribution.distribute_tensor(symbolic, layout)
    assert tree.map_structure(id, found) == tree.map_structure(id, symbolic)
