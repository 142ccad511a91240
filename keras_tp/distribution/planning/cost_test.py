import pytest

from keras_tp.distribution.planning import cost
from keras_tp.distribution.planning.graph import Graph


def test_sizes_for_a_batch_and_a_sequence_length():
    assert cost.Size(8, 1, 0).at(4, None) == 32
    assert cost.Size(8, 1, 2).at(4, 3) == 8 * 4 * 9
    assert cost.Size(8, 0, 0).at(4, 3) == 8


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((3, 8), (32, 1, 0)),
        ((3, 5, 8), (32, 1, 1)),
        # Attention scores, and batch and length merged into one dim.
        ((3, 2, 5, 5), (8, 1, 2)),
        ((15, 8), (32, 1, 1)),
        ((), (4, 0, 0)),
    ],
)
def test_placeholder_sizes_give_exponents(shape, expected):
    graph = Graph("net", 3, 5)
    value = graph.new_value("result", shape, "float32")
    assert cost.size_of(value, graph) == cost.Size(*expected)


def test_a_length_to_which_others_are_joined():
    """8 image tokens before a text."""
    graph = Graph("net", 3, 11)
    value = graph.new_value("result", (3, 19, 4), "float32")
    twice = graph.new_value("result", (3, 19, 19), "float32")
    half = graph.new_value("result", (3, 6, 4), "float32")
    graph.lengths = {
        (value.index, 1): (1, 8),
        (twice.index, 1): (1, 8),
        (twice.index, 2): (1, 8),
        (half.index, 1): (0.5, 0.0),
    }
    size = cost.size_of(value, graph)
    assert size == cost.Size(16, 1, 1, 8)
    assert size.at(2, 16) == 4 * 2 * 24 * 4
    assert size.listed() == [16, 1, 1, 8]
    assert cost.size_of(twice, graph).at(2, 16) == 4 * 2 * 24 * 24
    assert cost.size_of(half, graph) == cost.Size(8, 1, 1)
    assert cost.Size(8, 1, 1).listed() == [8, 1, 1]


def test_an_example_that_is_added_to_each_batch():
    graph = Graph("net", 3, 5)
    value = graph.new_value("result", (4, 5, 8), "float32")
    flat = graph.new_value("result", (7, 8), "float32")
    graph.batches = {(value.index, 0): (1, 1), (flat.index, 0): (2, 1)}
    size = cost.size_of(value, graph)
    assert size == cost.Size(32, 1, 1, 0, 1)
    assert size.at(2, 16) == 4 * 3 * 16 * 8
    assert size.listed() == [32, 1, 1, 0, 1]
    assert cost.size_of(flat, graph).at(2, 16) == 4 * 5 * 8


def test_bytes_of_elements():
    dtypes = ("float32", "bfloat16", "bool", "string")
    assert [cost.item_bytes(name) for name in dtypes] == [4, 2, 1, 0]
