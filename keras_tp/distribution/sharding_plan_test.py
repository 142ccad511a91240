import json
import re

import keras
import numpy as np
import pytest
from keras import layers

from integration_tests import harness
from integration_tests import html_pages
from keras_tp import distribution
from keras_tp.distribution import ShardingPlan


def build():
    inputs = keras.Input((12,))
    x = layers.Dense(10, name="first")(inputs)
    x = layers.LayerNormalization(name="norm")(x)
    x = layers.Dense(16, activation="relu", name="up")(x)
    return keras.Model(inputs, layers.Dense(5, name="down")(x), name="mlp")


def plan(**kwargs):
    return distribution.plan_sharding(build, harness.mesh((1, 2)), **kwargs)


def test_json_round_trip():
    made = plan()
    text = made.to_json()
    read = ShardingPlan.from_json(text)
    assert read.to_json() == text
    assert read.variables == made.variables
    assert read.diff(made) == {}
    assert read.memory(4) == made.memory(4)
    assert read.collectives(4) == made.collectives(4)
    assert read.summary() == made.summary()
    # One line for each variable, so that a diff can be read.
    lines = [line for line in text.splitlines() if '"path": "up/' in line]
    assert len([line for line in lines if '"blocks"' in line]) == 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: text[: len(text) // 2], "cut off"),
        (lambda text: "[]", "not a sharding plan"),
        (lambda text: text.replace('"format": 1', '"format": 2'), "format=2"),
    ],
)
def test_files_that_are_no_plan(change, message):
    with pytest.raises(ValueError, match=message):
        ShardingPlan.from_json(change(plan().to_json()))


def test_a_file_for_another_mesh():
    with pytest.raises(ValueError, match="plan is for a mesh of shape"):
        ShardingPlan.from_json(plan().to_json(), harness.mesh((2, 1)))


def test_an_override_of_two_axes_survives_the_file():
    made = plan(overrides={"up/kernel": (None, ("batch", "model"))})
    read = ShardingPlan.from_json(made.to_json())
    assert read["up/kernel"].axes == (None, ("batch", "model"))


def test_diff():
    other = plan(overrides={"up/kernel": (None, None)})
    assert plan().diff(other)["up/kernel"] == (
        ((None, "model"), 1),
        ((None, None), 1),
    )
    assert "norm/gamma" not in plan().diff(other)


def test_compare_finds_what_a_map_does_worse():
    layout_map = distribution.LayoutMap(harness.mesh((1, 2)))
    layout_map["up/kernel"] = ("model", None)
    layout_map["down/kernel"] = ("model", None)
    found = dict(plan().compare(layout_map))
    assert "communicates: normalized over this dim" in found["up/kernel"]
    assert "would save 32 B" in found["up/bias"]
    assert set(found) == {"up/kernel", "up/bias"}
    assert plan().compare(plan().layout_map) == []


def test_memory_is_what_the_devices_hold():
    # On several processes a model is on all of them.
    made = distribution.plan_sharding(
        build, harness.mesh(harness.fitted((1, 2)))
    )
    with made.distribution().scope():
        model = build()
        model.compile("adam", "mse")
        model.fit(np.ones((4, 12)), np.ones((4, 5)), verbose=0)
    report = distribution.describe(model)
    held = {"weight": 0, "slot": 0}
    for row in report.rows:
        if row.role in held and row.shape:
            held[row.role] += max(row.device_bytes.values())
    predicted = made.memory(4, optimizer="adam")
    assert predicted["parameters"] == held["weight"]
    assert predicted["slots"] == held["slot"]
    assert predicted["gradients"] == held["weight"]
    assert sum(predicted.values()) == 2 * predicted["total"]


def test_memory_of_other_optimizers_and_dtypes():
    made = plan()
    parameters = made.memory(4)["parameters"]
    assert made.memory(4, optimizer="sgd")["slots"] == 0
    assert made.memory(4, optimizer="lion")["slots"] == parameters
    half = made.memory(4, dtype="bfloat16")["parameters"]
    assert 2 * half == parameters
    with pytest.raises(ValueError, match="must be one of"):
        made.memory(4, optimizer="nothing")


def test_summary_names_everything():
    text = plan().summary()
    for part in ("up/kernel", "(None, 'model')", "normalized over this dim"):
        assert part in text
    data = json.loads(plan().to_json())
    assert {row["path"] for row in data["variables"]} == {
        v.path for v in build().weights
    }


def test_page(tmp_path):
    path = harness.own_folder(tmp_path) / "plan.html"
    plan().to_html(path, batch_size=16, target="v5e")
    page = html_pages.Page(path.read_text(encoding="utf-8"))
    for part in ("up/ kernel", "16 model", "normalized over this dim", "160 B"):
        assert part in page.text
    # The output of the pair, and the gradient of what it takes in.
    assert "2 x all-reduce" in page.text
    assert "of 16.00 GiB (Cloud TPU v5e)" in page.text
    with pytest.raises(ValueError, match="`target` must be one of"):
        plan().to_html(path, target="h1000")


def test_pictures(tmp_path):
    folder = harness.own_folder(tmp_path)
    plan().plot(folder / "plan.svg")
    text = (folder / "plan.svg").read_text(encoding="utf-8")
    assert text.startswith("<?xml") and "up" in text
    with pytest.raises(ValueError, match="ends in `.svg` or `.png`"):
        plan().plot(folder / "plan.jpg")


def test_a_notebook_shows_a_piece_of_a_page():
    page = html_pages.Page(plan()._repr_html_())
    assert "Sharding plan of mlp" in page.text
    assert "script" not in [tag for tag, _ in page.attributes]


class Tied(layers.Layer):
    """The scores of all entries of a table of embeddings."""

    def __init__(self, table, **kwargs):
        super().__init__(**kwargs)
        self.table = table

    def call(self, x):
        return keras.ops.matmul(x, keras.ops.transpose(self.table.embeddings))


def build_tied():
    tokens = keras.Input((6,), dtype="int32")
    table = layers.Embedding(16, 8, name="z_table")
    y = table(tokens)
    x = layers.Dense(12, activation="relu", name="y_up")(y)
    x = y = y + layers.Dense(8, name="x_down")(x)
    x = layers.LayerNormalization(name="w_norm")(x)
    x = layers.Dense(12, activation="relu", name="b_up")(x)
    y = y + layers.Dense(8, name="a_down")(x)
    return keras.Model(tokens, Tied(table, name="a_head")(y))


def test_the_order_is_that_of_the_forward_pass(tmp_path):
    """Of variables, sums, and both in the picture; names say the opposite."""
    made = distribution.plan_sharding(build_tied, harness.mesh((1, 2)))
    layer_names = ["z_table", "y_up", "x_down", "w_norm", "b_up", "a_down"]
    paths = [row.path.rpartition("/")[0] for row in made.variables]
    assert list(dict.fromkeys(paths)) == layer_names
    sums = [(row.path, row.operation, row.backward) for row in made.reductions]
    assert sums == [
        ("z_table", "Take", False),
        ("y_up", "Matmul", True),
        ("x_down", "Matmul", False),
        ("b_up", "Matmul", True),
        ("a_down", "Matmul", False),
        ("a_head", "Matmul", True),
    ]
    path = harness.own_folder(tmp_path) / "tied.html"
    made.to_html(path)
    text = path.read_text(encoding="utf-8")
    text = text[text.index("class='flow'") :]
    seen = re.findall(
        r"class='name'[^>]*>(?:<title>[^<]*</title>)?(\w+)|class='node (\w+)",
        text,
    )
    assert [name or kind for name, kind in seen] == [
        *("z_table", "sum", "gradient", "y_up", "x_down", "sum", "w_norm"),
        *("gradient", "b_up", "a_down", "sum", "a_head", "gradient"),
    ]
