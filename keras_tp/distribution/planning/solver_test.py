import keras
import pytest
from keras import layers

from keras_tp.distribution.planning import planner  # noqa: F401, the rules
from keras_tp.distribution.planning import reasons
from keras_tp.distribution.planning import solver
from keras_tp.distribution.planning import trace


@pytest.fixture(scope="module")
def graph():
    inputs = keras.Input((6,))
    x = layers.Dense(8, activation="relu", name="up")(inputs)
    x = layers.Dense(6, name="down")(x)
    return trace.trace(keras.Model(inputs, layers.Dense(5, name="out")(x)))


def dims(solution):
    return {path: choice.dim for path, choice in solution.choices.items()}


def test_a_column_and_a_row_split_are_a_pair(graph):
    solution = solver.solve(graph, 2)
    found = dims(solution)
    assert found["up/kernel"] == 1 and found["up/bias"] == 0
    assert found["down/kernel"] == 0 and found["down/bias"] is None
    assert ("down", False) in [
        (r.path, r.backward) for r in solution.reductions
    ]


def test_dims_that_do_not_divide_stay_whole(graph):
    solution = solver.solve(graph, 7)
    assert set(dims(solution).values()) == {None}
    assert solution.reductions == []
    assert any("7" in text for text in solution.choices["up/kernel"].obstacles)


def test_a_large_dim_that_does_not_divide_is_split():
    def traced(units):
        inputs = keras.Input((7,))
        x = layers.Dense(units, activation="relu", name="up")(inputs)
        outputs = layers.Dense(7, name="down")(x)
        return trace.trace(keras.Model(inputs, outputs))

    # A part has at least 64 rows.
    assert set(dims(solver.solve(traced(130), 3)).values()) == {None}
    large = traced(193)
    solution = solver.solve(large, 3)
    assert dims(solution)["up/kernel"] == 1
    assert dims(solution)["down/kernel"] == 0
    assert "193 does not divide by 3" in solution.choices["up/kernel"].why
    whole = solver.solve(large, 3, uneven=False)
    assert set(dims(whole).values()) == {None}
    (obstacle,) = whole.choices["up/bias"].obstacles
    assert "no parts of different sizes" in obstacle


def test_one_device_splits_nothing(graph):
    assert set(dims(solver.solve(graph, 1)).values()) == {None}


def test_dims_that_the_user_fixes(graph):
    assert (
        dims(solver.solve(graph, 2, {"up/kernel": None}))["up/kernel"] is None
    )
    forced = dims(solver.solve(graph, 2, {"down/kernel": 1}))
    assert forced["down/kernel"] == 1 and forced["down/bias"] == 0


def test_a_head_whose_input_is_whole_is_split_by_columns():
    """Its rows would need a sum of the logits, and a gather of a gradient."""
    inputs = keras.Input((None,), dtype="int32")
    x = layers.Embedding(96, 16, name="tokens")(inputs)
    outputs = [layers.Dense(n, name=f"head_{n}")(x) for n in (96, 128)]
    for heads in ([outputs[0]], [outputs[1]], outputs):
        solution = solver.solve(trace.trace(keras.Model(inputs, heads)), 4)
        found = dims(solution)
        assert found["tokens/embeddings"] == 0
        kernels = {k: d for k, d in found.items() if k.endswith("kernel")}
        assert len(kernels) == len(heads) and set(kernels.values()) == {1}
        sums = [(r.kind, r.backward) for r in solution.reductions]
        assert sums == [("Take", False), ("Matmul", True)]


def test_rows_whose_input_is_whole_are_not_predicted():
    inputs = keras.Input((12,))
    up = layers.Dense(16, activation="relu", use_bias=False, name="up")
    model = keras.Model(inputs, layers.Dense(6, name="down")(up(inputs)))
    forced = {"up/kernel": None, "down/kernel": 0}
    found = solver.solve(trace.trace(model), 2, forced).choices
    assert found["down/kernel"].why == "override" + reasons.DISAGREES
    # The input of the model has no gradient that could be gathered.
    forced = {"up/kernel": 0, "down/kernel": None}
    found = solver.solve(trace.trace(model), 2, forced).choices
    assert found["up/kernel"].why == "override"
