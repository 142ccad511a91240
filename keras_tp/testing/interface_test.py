"""The functions of a backend, with the arguments of keras_tp's own."""

import ast
import importlib.util
import inspect
import pathlib

import pytest

from keras_tp.backend import current


def functions(name):
    """Returns a dict of each function of a module of JAX to its arguments."""
    # Read as text: JAX need not be installed.
    path = importlib.util.find_spec(f"keras_tp.backend.jax.{name}").origin
    return {
        node.name: f"({ast.unparse(node.args)})"
        for node in ast.parse(pathlib.Path(path).read_text()).body
        if isinstance(node, ast.FunctionDef)
        and (not node.name.startswith("_") or node.name.startswith("_to_"))
    }


# What the rest of keras_tp calls in `processes`.
OF_PROCESSES = (
    "world_size",
    "index",
    "is_first",
    "gather",
    "meet",
    "random_state",
    "set_random_state",
)


@pytest.mark.parametrize(
    "module", ["distribution_lib", "collectives", "processes"]
)
def test_functions(module):
    found = current.load(module)
    for name, arguments in functions(module).items():
        if module == "processes" and name not in OF_PROCESSES:
            continue
        assert hasattr(found, name), f"{name}{arguments} is missing"
        signature = inspect.signature(getattr(found, name))
        assert str(signature) == arguments, name


def test_each_row_of_the_hook_table_finds_what_it_replaces():
    for hook in current.load("distribution_lib").hook_table():
        if hook.is_due():
            hook.resolve()
        assert hook.why
