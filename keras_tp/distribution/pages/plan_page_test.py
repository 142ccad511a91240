import json
import re

import keras
import pytest
from keras import layers

from integration_tests import html_pages
from keras_tp import distribution
from keras_tp.distribution.device_mesh import DeviceMesh
from keras_tp.distribution.pages import figures
from keras_tp.distribution.pages import plan_layers
from keras_tp.distribution.pages import plan_page
from keras_tp.distribution.planning import cost
from keras_tp.distribution.planning.plan_rows import NOT_PREDICTED
from keras_tp.distribution.planning.plan_rows import PlannedGather
from keras_tp.distribution.planning.plan_rows import PlannedVariable


def build(blocks=3, words=64):
    tokens = keras.Input((None,), dtype="int32")
    x = layers.Embedding(words, 32, name="words")(tokens)
    for k in range(blocks):
        y = layers.LayerNormalization(name=f"norm_{k}")(x)
        y = layers.Dense(128, activation="gelu", name=f"up_{k}")(y)
        x = x + layers.Dense(32, name=f"down_{k}")(y)
    return keras.Model(tokens, x, name="a<b")


def plan(shape=(1, 4), words=64, **kwargs):
    count = shape[0] * shape[1]
    devices = [f"tpu:{k}" for k in range(count)]
    mesh = DeviceMesh(shape, ["batch", "model"], devices)
    return distribution.plan_sharding(
        lambda: build(words=words), mesh, **kwargs
    )


def data_of(text):
    found = re.search(r"id='ktp-data'>(.*?)</script>", text)
    return json.loads(found[1])


def bars(page, part):
    return [
        tag["width"]
        for _, tag in page.attributes
        if tag.get("data-part") == part and "width" in tag
    ]


def test_the_biggest_problem_is_first():
    overrides = {"words/embeddings": (None, None)}
    text = plan_page.page(plan(words=4000, overrides=overrides))
    page = html_pages.Page(text)
    leads = [name for name in page.classes if name in ("problem", "good")]
    assert leads[0] == "problem"
    assert "words/ embeddings is whole on each device: 500.00 KiB" in page.text
    assert "each would hold 375.00 KiB less" in page.text
    good = html_pages.Page(plan_page.page(plan()))
    assert "problem" not in good.classes and "good" in good.classes


def test_names_are_escaped():
    text = plan_page.page(plan())
    assert "a<b" not in text and "a&lt;b" in text
    # Also in the data of the script.
    made = plan()
    made.model_name = "</script><b>"
    assert "</script><b>" not in plan_page.page(made)
    assert "</script><b>" not in plan_page.piece(made)
    assert "<b>" not in plan_page.picture(made)


def test_repeated_layers_are_folded_everywhere():
    page = html_pages.Page(plan_page.page(plan()))
    rows = [tag for _, tag in page.attributes if "data-text" in tag]
    # Of the words, and of one block: scale, offset, two kernels, two biases.
    assert len(rows) == 7
    assert page.text.count("3 x") >= 3
    # Each path is listed when a row is unfolded.
    for k in range(3):
        assert f"up_{k}/ kernel" in page.text


def test_memory_and_communication_are_those_of_the_plan():
    made = plan((2, 2))
    text = plan_page.page(made, 16, 128, "sgd_momentum", "h100")
    page, memory = html_pages.Page(text), made.memory(16, 128, "sgd_momentum")
    whole = max(memory["total"], 84_942_979_072)
    for name in ("parameters", "gradients", "slots", "activations"):
        assert bars(page, name) == [f"{100 * memory[name] / whole:.3f}%"]
    data = data_of(text)
    assert (data["batch"], data["length"]) == (16, 128)
    assert data["replicas"] == 2
    # What the script adds up.
    total = 0
    for row in data["rows"]:
        for size in sum(row.values(), []):
            *fields, parts, times = size
            coefficient, batch, length, offset, added = fields
            one = coefficient * (8 + added) ** batch * (128 + offset) ** length
            total += times * (one // parts)
    counts = made.collectives(16, 128)
    assert total == sum(count.bytes for count in counts.values())


def test_rows_of_communication_have_all_collectives():
    made = plan((2, 2), fully_shard=True, sequence_parallel=True)
    rows = figures.communication_rows(made, plan_layers.folds_of(made))
    found = dict.fromkeys(figures.KINDS, 0)
    for row in rows:
        for kind, size in row.totals(4, 64).items():
            found[kind] += size
    counts = made.collectives(8, 64)
    assert found == {
        kind: counts[kind].bytes if kind in counts else 0 for kind in found
    }
    assert "3 x" in html_pages.Page(plan_page.page(made)).text


def test_the_picture_has_splits_and_sums():
    text = plan_page.picture(plan())
    assert "var(" not in text
    count = {kind: text.count(f"node {kind}") for kind in ("sum", "gradient")}
    # Of the words, and of one block that stands for all.
    assert count == {"sum": 2, "gradient": 1}
    assert "3 x" in text
    parted = plan_page.picture(plan(sequence_parallel=True))
    assert "node gather" in parted and "dashed" in parted
    whole = plan_page.picture(plan((4, 1)))
    assert "node" not in whole.split("</style>")[1]


def made_of(rows, gathers=(), activations=(), without_rule=None):
    mesh = DeviceMesh(
        (2, 2), ["batch", "model"], [f"tpu:{k}" for k in range(4)]
    )
    return distribution.ShardingPlan(
        *("net", mesh, "model", rows, [], list(activations), []),
        *(without_rule or {}, gathers),
    )


def row(path, axes=(None, "model"), why="why", obstacles=("", "")):
    return PlannedVariable(
        path, (64, 64), "float32", True, axes, 1, why, obstacles
    )


def test_other_findings():
    why = f"column-parallel, {NOT_PREDICTED}"
    rows = [row("up/kernel"), row("down/kernel", why=why)]
    made = made_of(rows, activations=[cost.Size(10**6, 1, 0)])
    page = html_pages.Page(plan_page.page(made, 4))
    assert "Activations are 97% of the memory of a step (batch 4" in page.text
    assert "1 variables cause collectives" in page.text
    assert "The first is down/ kernel" in page.text
    few = html_pages.Page(plan_page.page(made_of(rows[:1]), 4)).text
    assert "Activations are" not in few and "cause coll" not in few
    ruled = made_of(rows, without_rule={"Fold": "f"})
    assert "No rule for Fold" in html_pages.Page(plan_page.page(ruled)).text


def test_outputs_that_are_gathered():
    rows = [row(f"block_{k}/up/kernel") for k in range(4)]
    gathers = [
        PlannedGather(
            f"block_{k}/up", (None, "model"), False, cost.Size(64, 1, 0)
        )
        for k in range(4)
    ]
    drawn = plan_page.picture(made_of(rows, gathers))
    assert drawn.count("node gather") == 1 and "4 x" in drawn
    # A layer whose output is not gathered is not like the others.
    drawn = plan_page.picture(made_of(rows, gathers[:2]))
    assert drawn.count("node gather") == 1
    assert drawn.count("2 x block_[") == 2


def test_what_the_forward_pass_does_not_use_is_apart():
    text = "not in the forward pass that was traced"
    rows = [
        row("words/others", (None, None), obstacles=(text, text)),
        row("up/kernel"),
    ]
    drawn = plan_page.picture(made_of(rows))
    assert drawn.index("up<") < drawn.index("outputs")
    assert drawn.index("outputs") < drawn.index("words/others")


def test_dims_of_the_batch_axis_have_another_colour():
    axes = ("batch", "model")
    page = html_pages.Page(plan_page.page(made_of([row("up/kernel", axes)])))
    found = [tag["class"] for _, tag in page.attributes if "class" in tag]
    assert "dim batch" in found and "dim split" in found


def test_many_layers_that_communicate():
    # A gradient for each, of another size.
    rows = [
        row(f"{name}/kernel")._replace(shape=(64, 2 * k + 2))
        for k, name in enumerate("abcdefghijklmnopqrstuvwxyz")
    ]
    page = html_pages.Page(plan_page.page(made_of(rows)))
    bars_of = [tag for _, tag in page.attributes if "data-row" in tag]
    assert len(bars_of) == 26
    assert "2 more" in page.text


def test_a_step_that_cannot_be():
    made = plan()
    with pytest.raises(ValueError, match="`optimizer` must be one of"):
        plan_page.page(made, optimizer="nothing")
