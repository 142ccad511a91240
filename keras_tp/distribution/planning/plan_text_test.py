import types

from keras_tp.distribution.device_mesh import DeviceMesh
from keras_tp.distribution.planning import cost
from keras_tp.distribution.planning import plan_text
from keras_tp.distribution.planning.plan_rows import PlannedGather
from keras_tp.distribution.planning.plan_rows import PlannedReduction
from keras_tp.distribution.planning.plan_rows import PlannedVariable
from keras_tp.distribution.sharding_plan import ShardingPlan


def variable(path, axes=(None, None), blocks=1):
    return PlannedVariable(
        path, (4, 6), "float32", True, axes, blocks, "its <why>", ("", "")
    )


def reduction(path, backward=False, size=(8, 1, 2)):
    return PlannedReduction(path, "Matmul", backward, 1, cost.Size(*size))


def plan(variables, reductions, gathers=()):
    mesh = DeviceMesh((2,), ["model"], ["tpu:0", "tpu:1"])
    return ShardingPlan(
        "a<b",
        mesh,
        "model",
        variables,
        reductions,
        [],
        [],
        {"Fold": "f"},
        gathers,
    )


def test_how_a_size_grows():
    one = reduction("up", size=(8, 1, 1, -1, 1))
    text = plan_text.page(plan([variable("up/kernel")], [one]))
    assert "8 B x (batch + 1) x (length + -1)" in text


def test_table():
    rows = [
        variable("up/kernel", (None, "model")),
        variable("qkv/kernel", (None, "model"), blocks=3),
        variable("norm/scale"),
    ]
    text = plan_text.table(plan(rows, [reduction("up")]))
    assert "(None, 'model') in 3 blocks" in " ".join(text.split())
    assert "Mesh {'model': 2}: each device holds 192 B of 288 B; 66.7%" in text
    assert "1 sums over the devices" in text
    assert "No rule for Fold (first in 'f')" in text


def test_page_escapes_names_and_marks_dims():
    rows = [variable("up/kernel", (None, "model"))]
    page = plan_text.page(plan(rows, [reduction("up", backward=True)]))
    assert "a&lt;b" in page and "a<b" not in page
    assert "its &lt;why&gt;" in page
    assert "<span class='dim split'>6 model</span>" in page
    assert "gradient of its input is summed" in page
    assert "8 B x batch x length x length" in page


def test_outputs_that_are_gathered():
    rows = [variable(f"{name}/kernel") for name in ("up", "down")]
    gathers = [PlannedGather("up", (None, "model"), False, cost.Size(64, 1, 0))]
    made = plan(rows, [], gathers)
    text = " ".join(plan_text.table(made).split())
    assert "in a training step, 1 outputs gathered." in text
    page = plan_text.page(made)
    assert page.count("output is gathered from the devices, 64 B x batch") == 1
    assert page.index("gathered from") < page.index("<h2>down")
    assert "gathered" not in plan_text.page(plan(rows, []))


def test_sums_stand_between_the_layers_that_they_follow():
    rows = [variable(f"{name}/kernel") for name in ("table", "up", "down")]
    sums = [reduction(path) for path in ("table", "add", "down", "table")]
    made = types.SimpleNamespace(variables=rows, reductions=sums)
    found = [
        (path, [v.path for v in variables], [s.path for s in sums])
        for path, variables, sums in plan_text._in_order(made)
    ]
    assert found == [
        ("table", ["table/kernel"], ["table"]),
        ("up", ["up/kernel"], []),
        ("", [], ["add"]),
        ("down", ["down/kernel"], ["down"]),
        ("", [], ["table"]),
    ]
