import warnings

import keras
import numpy as np
import pytest
from keras import layers

from integration_tests import harness
from keras_tp import distribution as dist
from keras_tp.distribution import layout_map as layout_map_lib


@pytest.fixture
def layout_map():
    return dist.LayoutMap(harness.mesh(harness.fitted((1, 2))))


def mlp(name="net"):
    return keras.Sequential(
        [
            keras.Input((6,)),
            layers.Dense(12, name="up"),
            layers.Dropout(0.5, name="drop"),
            layers.Dense(4, name="down"),
        ],
        name=name,
    )


def quietly(call):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return call()


def test_exact_key_before_patterns_and_whole_path_only(layout_map):
    layout_map["net/up/kernel"] = (None, "model")
    layout_map[".*kernel"] = ("model", None)
    assert layout_map["net/up/kernel"].axes == (None, "model")
    assert layout_map["net/down/kernel"].axes == ("model", None)
    assert quietly(lambda: layout_map["net/up/kernel_scale"]) is None


def test_tuple_becomes_a_layout_with_the_maps_mesh(layout_map):
    layout_map["w"] = (("batch", "model"), None)
    assert isinstance(layout_map["w"], dist.TensorLayout)
    assert layout_map["w"].device_mesh is layout_map.device_mesh
    assert layout_map["w"].axes == (("batch", "model"), None)
    layout_map["v"] = dist.TensorLayout([["batch", "model"], None])
    assert layout_map["v"].axes == (("batch", "model"), None)


def test_lookups_are_renewed_when_the_map_changes(layout_map):
    assert layout_map["net/up/kernel"] is None
    layout_map[".*up/kernel"] = (None, "model")
    assert layout_map["net/up/kernel"].axes == (None, "model")
    del layout_map[".*up/kernel"]
    assert layout_map["net/up/kernel"] is None


@pytest.mark.parametrize(
    "key, path, root, found",
    [
        # Renamed, prefix lost, prefix gained.
        ("net/up/kernel", "net_1/up/kernel", "net_1", True),
        ("net/up/kernel", "up/kernel", None, True),
        ("up/kernel", "net/up/kernel", "net", True),
        ("sequential_3/.*kernel", "up/kernel", None, True),
        # The first part of the path is a layer.
        ("block_0/up/kernel", "block_1/up/kernel", None, False),
        ("up/kernel", "down/kernel", None, False),
        # Without its first part this pattern would match anything.
        ("encoder/.*kernel", "up/kernel", None, False),
        (r"block_\d/up/kernel", "up/kernel", None, False),
        # A variable that belongs to the model itself.
        ("net/scale", "scale", None, True),
        ("net/scale", "other/scale", None, False),
    ],
)
def test_lookup_without_the_outer_models_name(
    layout_map, key, path, root, found
):
    layout_map[key] = (None, "model")
    if not found:
        assert quietly(lambda: layout_map.layout_for(path, root)) is None
        return
    with pytest.warns(UserWarning) as caught:
        assert layout_map.layout_for(path, root).axes == (None, "model")
    assert repr(key) in str(caught[0].message)
    assert repr(path) in str(caught[0].message)


def test_the_output_of_a_layer_is_not_that_of_a_model(layout_map):
    layout_map["up/output"] = (None, "model")
    assert layout_map.layout_for("up/output", None) is not None
    assert layout_map.layout_for("net/up/output", "net") is not None
    assert quietly(lambda: layout_map.layout_for("net/output", "net")) is None
    layout_map["sequential/output"] = (None, None)
    found = layout_map.layout_for("sequential_1/output", "sequential_1")
    assert found.axes == (None, None)


def test_a_string_is_looked_up_without_its_root_if_a_layer_is_left(layout_map):
    layout_map["sequential/up/kernel"] = (None, "model")
    with pytest.warns(UserWarning, match="sequential_1/up/kernel"):
        layout = layout_map["sequential_1/up/kernel"]
    assert layout.axes == (None, "model")
    assert quietly(lambda: layout_map["up_1/kernel"]) is None


def test_two_patterns_without_the_root_are_ambiguous_too(layout_map):
    layout_map["a/up/kernel"] = (None, "model")
    layout_map["b/up/kernel"] = ("model", None)
    with pytest.raises(ValueError, match="a/up/kernel.*b/up/kernel"):
        layout_map.layout_for("c/up/kernel", "c")


def test_report_lists_matched_dead_and_unmatched(layout_map):
    layout_map[".*up/kernel"] = (None, "model")
    layout_map[".*up/output"] = ("batch", "model")
    layout_map["net/dwon/kernel"] = ("model", None)
    with dist.ModelParallel(layout_map=layout_map).scope():
        model = mlp()
    report = layout_map.report(model)
    assert report.matched == {
        ".*up/kernel": ["net/up/kernel"],
        ".*up/output": ["net/up/output"],
    }
    assert list(report.dead) == ["net/dwon/kernel"]
    assert report.dead["net/dwon/kernel"][0] == "net/down/kernel"
    # The largest first; random state is not listed.
    assert report.unmatched == [
        ("net/down/kernel", (12, 4), 192),
        ("net/up/bias", (12,), 48),
        ("net/down/bias", (4,), 16),
    ]
    assert report.large_unmatched == []
    assert len(report.problems()) == 1
    for text in ("net/up/kernel", "dwon", "net/down/kernel (12, 4)", "192 B"):
        assert text in str(report) or text in repr(report.dead)


def test_a_pattern_that_also_matches_without_a_root_is_a_problem(layout_map):
    layout_map["a/up/kernel"] = (None, "model")
    with dist.ModelParallel(layout_map=layout_map).scope():
        parts = []
        for name in ("a", "b"):
            part = keras.Sequential([layers.Dense(4, name="up")], name=name)
            with pytest.warns(UserWarning) if name == "b" else nothing():
                part.build((None, 6))
            parts.append(part)
        inputs = keras.Input((6,))
        model = keras.Model(inputs, [part(inputs) for part in parts])
    (problem,) = layout_map.report(model).problems()
    assert "'a/up/kernel'" in problem and "'b/up/kernel'" in problem


def nothing():
    return warnings.catch_warnings()


@pytest.mark.parametrize(
    "size, text",
    [(12, "12 B"), (2048, "2.00 KiB"), (3 * 2**19, "1.50 MiB")],
)
def test_format_bytes(size, text):
    assert layout_map_lib.format_bytes(size) == text


@pytest.mark.parametrize("dtype, size", [("float32", 4), ("bool", 1)])
def test_variable_bytes(dtype, size):
    variable = keras.Variable(np.ones((3, 5)), dtype=dtype, trainable=False)
    assert layout_map_lib.variable_bytes(variable) == 15 * size


def test_stored_bytes_do_not_depend_on_the_compute_dtype():
    layer = layers.Dense(4, dtype="mixed_bfloat16")
    layer.build((None, 6))
    assert layout_map_lib.variable_bytes(layer.kernel) == 6 * 4 * 4
