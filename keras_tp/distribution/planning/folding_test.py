import collections

import pytest

from keras_tp.distribution.planning import folding

Layer = collections.namedtuple("Layer", "path kind", defaults=["x"])


def fold(*paths, kinds=None):
    layers = [Layer(path) for path in paths]
    for index, kind in (kinds or {}).items():
        layers[index] = layers[index]._replace(kind=kind)
    return folding.fold(
        layers, lambda row: (folding.without_numbers(row.path), row.kind)
    )


BLOCKS = [f"block_{n}/{name}" for n in range(4) for name in ("up", "down")]


def test_blocks_between_other_layers():
    found = fold("words", *BLOCKS, "norm")
    assert [(one.times, len(one.sample)) for one in found] == [
        (1, 1),
        (4, 2),
        (1, 1),
    ]
    block = found[1]
    assert block.title() == "4 x block_[0-3]"
    assert block.prefix() == "block_0"
    assert block.name(1) == "4 x block_[0-3]/down"
    assert block.paths(0) == [f"block_{n}/up" for n in range(4)]
    # One layer has no title, so that it is listed by its path.
    assert found[0].title() == found[0].prefix() == ""


def test_a_layer_that_differs_ends_the_run():
    found = fold(*BLOCKS, kinds={5: "other"})
    assert [(one.times, one.sample[0].path) for one in found] == [
        (2, "block_0/up"),
        (1, "block_2/up"),
        (1, "block_2/down"),
        (1, "block_3/up"),
        (1, "block_3/down"),
    ]


def test_a_block_begins_where_its_numbers_do():
    blocks = [f"block_{n}/{name}" for n in range(4) for name in "abc"]
    found = fold(*blocks, kinds={0: "other"})
    assert [(one.times, one.sample[0].path) for one in found] == [
        (1, "block_0/a"),
        (1, "block_0/b"),
        (1, "block_0/c"),
        (3, "block_1/a"),
    ]


def test_the_first_layer_of_a_name_has_no_number():
    (one,) = fold("dense", "dense_1", "dense_2")
    assert one.times == 3
    assert one.name(0) == "3 x dense ... dense_2"


def test_each_layer_is_in_one_fold_and_in_order():
    paths = ["a", "b", "b_1", "a_1", "b_2", "b_3", "c", "a_2"]
    found = fold(*paths)
    listed = [
        layer.path for one in found for part in one.members for layer in part
    ]
    assert listed == paths
    # The longest run, not the first one.
    assert [one.times for one in found] == [2, 1, 1]


@pytest.mark.parametrize(
    ["paths", "text"],
    [
        (["a/b"], "a/b"),
        (["a_1/b_2", "a_1/b_3"], "a_1/b_[2-3]"),
        (["a", "a_1"], "a ... a_1"),
        (["a_0_bn", "a_3_bn"], "a_[0,3]_bn"),
    ],
)
def test_span(paths, text):
    assert folding.span(paths) == text


def test_parts_of_one_layer_are_a_group():
    found = folding.grouped(fold("words", "block/up", "block/down", "norm"))
    assert [len(one.sample) for one in found] == [1, 2, 1]
    assert found[1].title() == found[1].prefix() == "block"


def test_titles_of_blocks_without_a_layer_around_them():
    names = [f"conv_block{n}_{k}_conv" for n in (2, 3) for k in (1, 2)]
    (one,) = fold(*names, kinds={1: "y", 3: "y"})
    assert one.title() == "2 x conv_block[2-3]"
    (one,) = fold("up_0", "down_0", "up_1", "down_1")
    assert one.title() == "2 x up_[0-1] ... down_[0-1]"


def test_common_path():
    assert folding.common_path(["a/b/c", "a/b/d"]) == "a/b"
    assert folding.common_path(["a/b", "c/b"]) == ""


def test_groups_of_a_listing():
    layers = [Layer(path) for path in ("words", *BLOCKS, "dense", "dense_1")]
    found, said = folding.groups(
        layers,
        lambda row: folding.without_numbers(row.path),
        lambda row, name: name,
    )
    assert found == [
        ("", ["words"]),
        ("4 x block_[0-3]", ["up", "down"]),
        ("", ["2 x dense ... dense_1"]),
    ]
    assert "12 layers that are alike" in said[0]
    assert folding.groups(layers[:1], id, lambda row, name: name)[1] == []
