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


def test_repeated_layers_are_shown_once(monkeypatch):
    rows = [
        variable(f"block_{n}/{name}/kernel", axes)
        for n in range(12)
        for name, axes in (("up", (None, "model")), ("down", ("model", None)))
    ]
    for width in (80, 120):
        monkeypatch.setenv("COLUMNS", str(width))
        text = plan_text.table(plan(rows, []))
        lines = text.splitlines()
        assert max(map(len, lines)) <= width
        at = lines.index("12 x block_[0-11]")
        assert lines[at + 1].startswith("  up/kernel")
        assert text.count("kernel") == 2
        assert "stands for 12 layers" in text
    rows[7] = variable("block_3/down/kernel")
    text = plan_text.table(plan(rows, []))
    assert "3 x block_[0-2]" in text and "8 x block_[4-11]" in text
    assert "block_3/down/kernel" in text


def test_outputs_that_are_gathered():
    rows = [variable(f"{name}/kernel") for name in ("up", "down")]
    gathers = [PlannedGather("up", (None, "model"), False, cost.Size(64, 1, 0))]
    text = " ".join(plan_text.table(plan(rows, [], gathers)).split())
    assert "in a training step, 1 outputs gathered." in text
