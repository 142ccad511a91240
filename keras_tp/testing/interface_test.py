"""The functions of a backend, with the arguments of keras_tp's own."""

import ast
import importlib.util
import pathlib

import pytest

from keras_tp.backend import current


def functions(path):
    """Returns a dict of each public function of a file to its arguments."""
    return {
        node.name: ast.unparse(node.args)
        for node in ast.parse(pathlib.Path(path).read_text()).body
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")
    }


@pytest.mark.parametrize("module", ["distribution_lib", "collectives"])
def test_functions(module):
    # Read as text: JAX need not be installed.
    known = importlib.util.find_spec(f"keras_tp.backend.jax.{module}").origin
    found = functions(current.load(module).__file__)
    for name, arguments in functions(known).items():
        assert name in found, f"{name}({arguments}) is missing"
        assert found[name] == arguments, name
