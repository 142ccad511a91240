from keras.src.ops.numpy import Add

from keras_tp.distribution.planning import graph as graph_lib


def test_natural_order_of_paths():
    paths = ["layer_10/kernel", "layer_2/kernel", "layer_2/bias", "layer"]
    assert sorted(paths, key=graph_lib.natural) == [
        "layer",
        "layer_2/bias",
        "layer_2/kernel",
        "layer_10/kernel",
    ]


def test_variables_in_the_order_of_their_first_use():
    graph = graph_lib.Graph("net", 3, 5)
    unused, late, early = (
        graph.new_value(graph_lib.VARIABLE, (2,), "float32", path)
        for path in ("unused", "late", "early")
    )
    graph.variables += [unused, late, early]
    x = graph.new_value(graph_lib.INPUT, (3, 2), "float32")
    for variables in ([], [late], [early, late]):
        inputs = (x, early) if not variables else (x,)
        graph.steps.append(
            graph_lib.Step(Add(), inputs, {}, [], "", False, variables)
        )
    assert graph.in_order_of_use() == [early, late, unused]
    assert [value.index for value in graph.values] == [0, 1, 2, 3]


def test_values_of_a_step():
    graph = graph_lib.Graph("net", 3, 5)
    a, b = (
        graph.new_value(graph_lib.RESULT, (2, 3), t) for t in ("bool", "int32")
    )
    step = graph_lib.Step(
        Add(), ([a], 3), {"other": {"b": b}}, [a], "path", False, []
    )
    assert step.inputs == [a, b] and step.kind == "Add"
    # A boolean takes a byte.
    assert (a.nbytes, b.nbytes, a.ndim) == (6, 24, 2)
