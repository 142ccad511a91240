"""The import graph has no cycle, and no module imports from a higher room."""

import ast
import graphlib
import pathlib

import pytest

from keras_tp import backend

PACKAGE = pathlib.Path(__file__).parent
BACKENDS = [f"keras_tp.backend.{name}" for name in backend.SUPPORTED_BACKENDS]
PLANNING = "keras_tp.distribution.planning"
# From the bottom to the top. A module belongs to the room with the longest
# name that fits.
ROOMS = [
    PLANNING,
    "keras_tp.backend",
    *BACKENDS,
    "keras_tp.distribution",
    "keras_tp",
]
# What planning uses of the room above it.
SHARED = {
    "keras_tp.distribution.derived_variables",
    "keras_tp.distribution.tensor_layout",
}


def import_graph():
    """Returns a dict of module to the set of modules of ours it imports."""
    files = {
        ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts): path
        for path in PACKAGE.rglob("*.py")
        if not path.name.endswith(("_test.py", "conftest.py"))
    }
    modules = {name.removesuffix(".__init__") for name in files}
    graph = {}
    for name, path in files.items():
        found = set()
        # Imports inside of functions, too.
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found.update(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    inner = f"{node.module}.{alias.name}"
                    found.add(inner if inner in modules else node.module)
        own = name.removesuffix(".__init__")
        graph[own] = found & modules - {own}
    return graph


def room_of(module):
    return max(
        (room for room in ROOMS if f"{module}.".startswith(f"{room}.")),
        key=len,
    )


def arrows_up(graph):
    """Returns the imports of a module by one in a room below it."""
    return [
        f"{module} imports {imported}"
        for module, found in graph.items()
        for imported in sorted(found)
        if ROOMS.index(room_of(imported)) > ROOMS.index(room_of(module))
        # A module that imports none of ours is below all of them.
        and graph[imported]
        and not (room_of(module) == PLANNING and imported in SHARED)
    ]


def test_there_is_no_circle():
    order = list(graphlib.TopologicalSorter(import_graph()).static_order())
    assert len(order) > 100


def test_no_arrow_goes_up():
    assert not arrows_up(import_graph())


def test_a_backend_is_imported_by_itself_only():
    for module, found in import_graph().items():
        for imported in found:
            if room_of(imported) in BACKENDS:
                assert room_of(module) == room_of(imported), (module, imported)


def test_planning_imports_no_backend():
    for module, found in import_graph().items():
        if room_of(module) == PLANNING:
            outside = {m for m in found if room_of(m) != PLANNING}
            assert outside <= SHARED, module


@pytest.mark.parametrize(
    ["module", "imported"],
    [
        ("keras_tp.backend.hooks", "keras_tp"),
        ("keras_tp.backend.hooks", "keras_tp.distribution.layout_map"),
        ("keras_tp.backend.hooks", "keras_tp.backend.torch.hooks"),
        ("keras_tp.distribution.planning.graph", "keras_tp.backend.hooks"),
        ("keras_tp.distribution.report", "keras_tp.launch"),
    ],
)
def test_an_arrow_up_would_be_found(module, imported):
    graph = {module: {imported}, imported: {module}}
    assert arrows_up(graph) == [f"{module} imports {imported}"]


def test_a_circle_would_be_found():
    graph = import_graph()
    graph["keras_tp.distribution.layout_map"].add("keras_tp.launch")
    graph["keras_tp.launch"].add("keras_tp.distribution.layout_map")
    with pytest.raises(graphlib.CycleError):
        list(graphlib.TopologicalSorter(graph).static_order())
