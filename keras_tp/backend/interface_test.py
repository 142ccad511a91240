"""The tree keeps its own rules: interface, imports, no annotations."""

import ast
import pathlib

import pytest

from keras_tp import backend

PACKAGE = pathlib.Path(backend.__file__).parent.parent
PAGE = PACKAGE.parent / "docs" / "backend_interface.md"
FRAMEWORKS = {"jax", "jaxlib", "tensorflow", "torch", "torch_xla"}
SOURCES = [
    path
    for path in sorted(PACKAGE.rglob("*.py"))
    if not path.name.endswith("_test.py")
]


def parsed(path):
    return ast.parse(path.read_text())


def functions(path):
    """Name -> arguments of the functions of a module, read as text."""
    return {
        node.name: ast.unparse(node.args)
        for node in parsed(path).body
        if isinstance(node, ast.FunctionDef)
    }


def documented(table):
    """Module -> name -> arguments as a table of the page has them."""
    tables = PAGE.read_text().split("|---|---|\n")[1:]
    found = {}
    for row in tables[table].splitlines():
        if row[:2] != "| ":
            break
        for cell in row.split("|")[1].split("`")[1::2]:
            name, _, args = cell.partition("(")
            found[name] = args.removesuffix(")")
    return found


@pytest.mark.parametrize("name", backend.SUPPORTED_BACKENDS)
@pytest.mark.parametrize(
    "table, module, count",
    [(0, "distribution_lib", 29), (1, "collectives", 3)],
)
def test_every_backend_has_the_documented_functions(table, module, count, name):
    got = functions(PACKAGE / "backend" / name / f"{module}.py")
    want = documented(table)
    assert len(want) == count
    public = {n for n in got if not n.startswith("_")}
    assert public == {n for n in want if not n.startswith("_")}
    for function in public:
        assert got[function].replace("'", '"') == want[function], function
    for function in set(want) - public:
        # Private, called with one positional argument.
        assert len(got[function].split(",")) == 1, function


def test_every_backend_folder_is_supported():
    folders = {
        path.parent.name
        for path in (PACKAGE / "backend").glob("*/distribution_lib.py")
    }
    assert folders == set(backend.SUPPORTED_BACKENDS)


def imports(path):
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: p.name)
def test_frameworks_are_imported_by_their_backend_only(path):
    inside = path.relative_to(PACKAGE).parts
    own = inside[1] if inside[0] == "backend" and len(inside) > 2 else None
    for module in imports(path):
        root = module.split(".")[0]
        if root in FRAMEWORKS:
            roots = own, f"{own}lib", (own or "").partition("_")[0]
            assert root in roots, module


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: p.name)
def test_style(path):
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.FunctionDef):
            assert node.returns is None, node.name
            assert not [a for a in node.args.args if a.annotation], node.name
        if isinstance(node, ast.ExceptHandler):
            assert node.type is not None
            assert ast.unparse(node.type) != "Exception", node.lineno
        # What the commands print is what they are for.
        if isinstance(node, ast.Call) and path.parent.name != "command_line":
            assert ast.unparse(node.func) != "print", node.lineno


def test_a_module_is_one_concept():
    for path in SOURCES:
        assert len(path.read_text().splitlines()) <= 450, path
