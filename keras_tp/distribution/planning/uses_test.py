import keras
import numpy as np
import pytest
from keras import layers

from keras_tp.distribution.planning import planner  # noqa: F401, the rules
from keras_tp.distribution.planning import reasons
from keras_tp.distribution.planning import solver
from keras_tp.distribution.planning import trace

ROWS = 48


class Positions(layers.Layer):
    """Adds rows of a table that are the same in each step."""

    def __init__(self, rows):
        super().__init__(name="positions")
        self.rows = rows
        self.table = layers.Embedding(ROWS, 12, name="table")

    def build(self, shape):
        self.table.build()

    def call(self, x):
        found = keras.ops.reshape(self.table(self.rows), (-1, 12))
        return x + keras.ops.sum(keras.ops.square(found), 0)


def why(rows):
    inputs = keras.Input((16, 12))
    x = Positions(rows)(inputs)
    x = layers.Dense(16, name="up")(layers.LayerNormalization()(x))
    model = keras.Model(inputs, layers.Dense(12, name="down")(x))
    choices = solver.solve(trace.trace(model), 2).choices
    assert choices["positions/table/embeddings"].dim == 0
    return choices["positions/table/embeddings"].why


@pytest.mark.parametrize(
    "rows",
    [np.arange(ROWS), np.tile(np.arange(ROWS), (2, 1)), np.array([[5]])],
)
def test_lookups_for_which_xla_has_no_sum_are_not_predicted(rows):
    assert why(rows).endswith(reasons.KNOWN_ROWS)


@pytest.mark.parametrize(
    "rows", [np.arange(20), np.array([5, 5]), np.arange(ROWS).reshape(2, -1)]
)
def test_other_lookups_of_known_rows_are_sums(rows):
    assert (
        why(rows) == "row-parallel embedding: one all-reduce after the lookup"
    )


def test_a_table_may_have_other_lookups():
    """One of them is enough."""
    table = layers.Embedding(ROWS, 12, name="table")
    inputs = keras.Input((16,), dtype="int32")
    x = table(inputs)

    class Padded(layers.Layer):
        def __init__(self, rows):
            super().__init__()
            self.rows = rows

        def call(self, x):
            return x + keras.ops.sum(table(self.rows), 0)

    for rows, count in ((np.array([5, 5]), 0), (np.array([5]), 1)):
        y = Padded(rows)(x)
        y = layers.Dense(16, name="up")(layers.LayerNormalization()(y))
        model = keras.Model(inputs, layers.Dense(12, name="down")(y))
        choices = solver.solve(trace.trace(model), 2).choices
        text = choices["table/embeddings"].why
        assert text.count(reasons.KNOWN_ROWS) == count


@pytest.mark.parametrize("is_resized", [False, True])
def test_a_gradient_that_passes_a_resize_is_not_predicted(is_resized):
    inputs = keras.Input((4, 4, 3))
    x = layers.Conv2D(8, 1, name="first")(inputs)
    x = layers.LayerNormalization()(x)
    if is_resized:
        x = keras.ops.image.resize(x, (8, 8))
    x = layers.Concatenate()([x, x])
    x = layers.Conv2D(64, 1, name="up")(x)
    model = keras.Model(inputs, layers.Conv2D(3, 1, name="down")(x))
    choice = solver.solve(trace.trace(model), 2).choices["up/kernel"]
    assert choice.dim == 3
    assert (reasons.AFTER_A_RESIZE in choice.why) == is_resized
