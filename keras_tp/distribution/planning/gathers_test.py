import keras
import pytest
from keras import layers

from keras_tp.distribution.planning import planner  # noqa: F401, the rules
from keras_tp.distribution.planning import reasons
from keras_tp.distribution.planning import solver
from keras_tp.distribution.planning import trace


def normalized(*units, width=16):
    inputs = keras.Input((width,))
    x = inputs
    for k, size in enumerate(units):
        x = layers.Dense(size, activation="relu", name=f"dense_{k}")(x)
        x = layers.LayerNormalization(name=f"norm_{k}")(x)
    return keras.Model(inputs, x)


def solved(model, count=4, least=0, **kwargs):
    graph = trace.trace(model)
    return solver.solve(graph, count, gather_outputs=least, **kwargs)


def split(solution):
    """Returns a dict of each split matrix to its dim."""
    return {
        path: choice.dim
        for path, choice in solution.choices.items()
        if choice.dim is not None and path.endswith("kernel")
    }


def gathered(solution):
    return [path for path, *_ in solution.gathers]


def test_a_kernel_is_split_although_its_output_is_needed_whole():
    model = normalized(32)
    assert not split(solver.solve(trace.trace(model), 4))
    solution = solved(model)
    assert split(solution) == {"dense_0/kernel": 1}
    assert solution.choices["dense_0/bias"].dim == 0
    ((path, tensor, dim, is_scattered),) = solution.gathers
    assert (path, tensor.shape[1:], dim) == ("dense_0", (32,), 1)
    assert not is_scattered
    assert solution.split_dim(tensor) is None
    why = solution.choices["dense_0/kernel"].why
    assert why == reasons.COLUMN + reasons.GATHERED
    # What stays whole says why, as without a gather.
    assert "normalized" in solution.choices["norm_0/gamma"].why


def test_only_as_many_as_are_needed():
    """Those first that save most for each byte that is gathered."""
    # Of 4 x 64 and 64 x 64, more than 90 % is in the second.
    solution = solved(normalized(64, 64, width=4))
    assert gathered(solution) == ["dense_1"]
    assert split(solution) == {"dense_1/kernel": 1}
    assert "normalized" in solution.choices["dense_0/kernel"].why


def test_kernels_that_are_too_small():
    assert gathered(solved(normalized(64, 64), least=16 * 64 * 4 + 1)) == [
        "dense_1"
    ]
    assert not gathered(solved(normalized(64, 64), least=2**24))


def test_enough_is_split_without_a_gather():
    inputs = keras.Input((16,))
    x = layers.Dense(16, name="open")(inputs)
    x = layers.LayerNormalization()(x)
    x = layers.Dense(256, activation="relu", name="up")(x)
    x = layers.Dense(16, name="down")(x)
    model = keras.Model(inputs, layers.LayerNormalization()(x))
    solution = solved(model)
    assert split(solution) == {"up/kernel": 1, "down/kernel": 0}
    assert not solution.gathers


def test_a_choice_of_the_user_stays():
    solution = solved(normalized(32), forced={"dense_0/kernel": None})
    assert not split(solution) and not solution.gathers
    assert not solved(normalized(32), count=1).gathers


def test_a_dim_that_does_not_divide():
    solution = solved(normalized(30))
    assert not split(solution) and not solution.gathers
    assert "normalized" in solution.choices["dense_0/kernel"].why


def test_a_layer_that_is_called_twice():
    inputs = keras.Input((16,))
    dense = layers.Dense(16, name="twice")
    x = layers.LayerNormalization()(dense(inputs))
    x = layers.LayerNormalization()(dense(x))
    assert gathered(solved(keras.Model(inputs, x))) == ["twice", "twice"]


def test_a_product_inside_of_a_softmax():
    inputs = keras.Input((16,))
    x = layers.Dense(32, activation="softmax", name="chosen")(inputs)
    x = layers.LayerNormalization()(x)
    assert not gathered(solved(keras.Model(inputs, x)))


class Positions(layers.Layer):
    def build(self, shape):
        self.table = self.add_weight(shape=(40, shape[-1]), name="table")

    def call(self, x):
        return keras.ops.expand_dims(self.table[: x.shape[1]], 0)


def test_a_table_that_is_sliced_is_gathered_without_a_batch():
    inputs = keras.Input((8, 16))
    x = inputs + Positions(name="positions")(inputs)
    model = keras.Model(inputs, layers.LayerNormalization()(x))
    solution = solved(model)
    assert solution.choices["positions/table"].dim == 1
    ((path, tensor, dim, _),) = solution.gathers
    assert (path, tensor.shape, dim) == ("positions", (1, 8, 16), 2)


def test_the_layers_before_a_kernel_that_reads_blocks_are_gathered():
    """A convolution of two split outputs side by side, which is whole."""
    inputs = keras.Input((8, 8, 64))
    x = layers.LayerNormalization()(inputs)
    x = [layers.Conv2D(32, 1, name=f"part_{k}")(x) for k in range(2)]
    x = layers.Concatenate(name="both")(x)
    x = layers.Conv2D(64, 3, name="after")(x)
    model = keras.Model(inputs, layers.LayerNormalization()(x))
    graph = trace.trace(model)
    without = solver.solve(graph, 4).choices["after/kernel"]
    assert without.dim is None and without.why.endswith(reasons.DISAGREES)
    solution = solved(model)
    # A device has a part of each, which is no part of the whole.
    assert gathered(solution) == ["part_0", "part_1", "after"]
    assert [g.dim for g in solution.gathers] == [3, 3, 3]
    assert solution.choices["after/kernel"].dim == 3
    assert not any(
        choice.why.endswith(reasons.DISAGREES)
        for choice in solution.choices.values()
    )


@pytest.mark.parametrize("count", [2, 4, 8])
def test_the_graph_is_not_changed(count):
    graph = trace.trace(normalized(64, 64))
    steps, values = list(graph.steps), list(graph.values)
    solution = solver.solve(graph, count, gather_outputs=0)
    assert graph.steps == steps and graph.values == values
    assert solution.graph is not graph
    kinds = [step.kind for step in solution.graph.steps]
    assert kinds.count("GatherOutput") == 2
