import types

import pytest

from keras_tp.distribution.pages import plan_layers
from keras_tp.distribution.planning import cost
from keras_tp.distribution.planning.plan_rows import PlannedReduction
from keras_tp.distribution.planning.plan_rows import PlannedVariable


def variable(path, axes=(None, None), obstacles=("", "")):
    return PlannedVariable(
        path, (4, 6), "float32", True, axes, 1, "why", obstacles
    )


def reduction(path, backward=False):
    return PlannedReduction(path, "Matmul", backward, 1, cost.Size(8, 1, 0))


def plan(variables, sums=()):
    return types.SimpleNamespace(
        variables=variables, reductions=list(sums), gathers=[], axis="model"
    )


def test_sums_stand_between_the_layers_that_they_follow():
    rows = [variable(f"{name}/kernel") for name in ("table", "up", "down")]
    sums = [reduction(path) for path in ("table", "add", "down", "table")]
    found = [
        (path, [v.path for v in variables], [s.path for s in sums])
        for path, variables, sums in plan_layers.in_order(plan(rows, sums))
    ]
    assert found == [
        ("table", ["table/kernel"], ["table"]),
        ("up", ["up/kernel"], []),
        ("", [], ["add"]),
        ("down", ["down/kernel"], ["down"]),
        ("", [], ["table"]),
    ]
    layers = plan_layers.layers_of(plan(rows, sums))
    assert [(layer.path, bool(layer.rows)) for layer in layers] == [
        ("table", True),
        ("up", True),
        ("add", False),
        ("down", True),
        ("table", False),
    ]


COLUMN, ROW = (None, "model"), ("model", None)


@pytest.mark.parametrize(
    ["axes", "sums", "mark"],
    [
        (COLUMN, [reduction("up", backward=True)], plan_layers.COLUMN),
        (ROW, [reduction("up")], plan_layers.ROW),
        # A normalization whose gradient is summed.
        ((None, None), [reduction("up", backward=True)], plan_layers.WHOLE),
        ((None, None), [], plan_layers.WHOLE),
        # Fully sharded only: gathered before it is used.
        (("batch", None), [], plan_layers.WHOLE),
        ((None, ("batch", "model")), [], plan_layers.COLUMN),
    ],
)
def test_marks(axes, sums, mark):
    (layer,) = plan_layers.layers_of(plan([variable("up/k", axes)], sums))
    assert layer.mark == mark


def test_what_the_forward_pass_does_not_use():
    text = "not in the forward pass that was traced"
    row = variable("table/other", obstacles=(text, text))
    (layer,) = plan_layers.layers_of(plan([row]))
    assert layer.mark == plan_layers.UNUSED


def blocks(count):
    rows = [variable("words/embeddings", ROW)]
    sums = [reduction("words")]
    for k in range(count):
        up, down = f"block_{k}/up", f"block_{k}/down"
        rows += [variable(f"{up}/kernel", COLUMN)]
        rows += [variable(f"{down}/kernel", ROW)]
        sums += [reduction(up, backward=True), reduction(down)]
    return plan(rows, sums)


def test_repeated_blocks_are_folded():
    found = plan_layers.folds_of(blocks(12))
    assert [(fold.times, len(fold.sample)) for fold in found] == [
        (1, 1),
        (12, 2),
    ]


def test_a_block_that_communicates_differently_is_not():
    made = blocks(12)
    made.reductions = [
        row for row in made.reductions if row.path != "block_4/up"
    ]
    found = plan_layers.folds_of(made)
    assert [fold.times for fold in found] == [1, 4, 1, 7]
