"""Bytes on each device: 1/N of what is split, its slots included."""

import math

import keras
import numpy as np
import pytest

from integration_tests import harness
from integration_tests import zoo
from keras_tp import distribution

opt = keras.optimizers

# Optimizer and how many slots it keeps for each weight. Muon's depend on the
# rank: a momentum for all, and a velocity for what it leaves to Adam.
OPTIMIZERS = {
    "sgd": (lambda: opt.SGD(0.01), 0),
    "sgd_momentum": (lambda: opt.SGD(0.01, momentum=0.9), 1),
    "rmsprop": (lambda: opt.RMSprop(0.01, momentum=0.9, centered=True), 3),
    "adam": (lambda: opt.Adam(0.01), 2),
    "adam_amsgrad": (lambda: opt.Adam(0.01, amsgrad=True), 3),
    "adamw": (lambda: opt.AdamW(0.01), 2),
    "adadelta": (lambda: opt.Adadelta(0.1), 2),
    "adagrad": (lambda: opt.Adagrad(0.01), 1),
    "adamax": (lambda: opt.Adamax(0.01), 2),
    "nadam": (lambda: opt.Nadam(0.01), 2),
    "ftrl": (lambda: opt.Ftrl(0.01), 2),
    "lion": (lambda: opt.Lion(0.01), 1),
    "lamb": (lambda: opt.Lamb(0.01), 2),
    "muon": (lambda: opt.Muon(0.01), {1: 2, 2: 1}),
    "schedule_free_adamw": (
        lambda: opt.ScheduleFreeAdamW(0.01, warmup_steps=2),
        2,
    ),
    "loss_scale": (lambda: opt.LossScaleOptimizer(opt.Adam(0.01)), 2),
    "accumulation": (
        lambda: opt.Adam(0.01, gradient_accumulation_steps=2),
        3,
    ),
    "ema": (
        lambda: opt.Adam(
            0.01, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=2
        ),
        3,
    ),
    # Its factors have a test of their own.
    "adafactor": (lambda: opt.Adafactor(0.01), 1),
}
# Two, so that accumulated gradients are applied, and averages.
STEPS = 2


def train(case, optimizer):
    model = harness.build(case)
    model.compile(optimizer(), case.loss)
    if distribution.distribution() is None:
        # Plain Keras on TensorFlow traces the building of an optimizer with
        # the first step, and slots that start as their weights start as zeros.
        model.optimizer.build(model.trainable_variables)
    x, y = harness.data_of(case)
    for _ in range(STEPS):
        model.train_on_batch(x, y)
    return model


def assert_bytes(row, names, parts):
    """Each of the devices holds 1 / `parts` of a row's variable."""
    assert row.bytes % parts == 0
    assert row.device_bytes == dict.fromkeys(names, row.bytes // parts), row


def assert_live(variable, row):
    """What `describe` says, compared with the array itself."""
    if keras.config.backend() != "jax":
        return
    shards = variable.value.addressable_shards
    assert row.device_bytes == {
        f"{shard.device.platform}:{shard.device.id}": shard.data.nbytes
        for shard in shards
    }
    size = math.prod(shards[0].data.shape)
    assert size * row.bytes == math.prod(row.shape) * shards[0].data.nbytes


@harness.shapes((1, 4), (2, 2))
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_weights_and_slots(name, shape):
    optimizer, slots = OPTIMIZERS[name]
    case = zoo.CASES["mlp"]
    harness.assert_plain()
    expected = harness.weights_of(train(case, optimizer))

    layouts = harness.model_parallel(case.layouts, shape)
    with layouts.scope():
        model = train(case, optimizer)
    parts = shape[1]
    names = harness.mesh_devices(shape)
    report = distribution.describe(model)
    by_role = {role: [] for role in ("weight", "slot", "metric", "seed")}
    for row in report.rows:
        by_role[row.role].append(row)

    split = {row.path for row in by_role["weight"] if row.is_split}
    assert split == case.split
    live = {v.path: v for v in [*model.weights, *model.optimizer.variables]}
    for weight in by_role["weight"]:
        weight_parts = parts if weight.path in case.split else 1
        assert_bytes(weight, names, weight_parts)
        assert_live(live[weight.path], weight)
        # A slot is named after its variable: "up_kernel_momentum".
        prefix = weight.path.replace("/", "_") + "_"
        own = [
            row
            for row in by_role["slot"]
            if row.path.split("/")[-1].startswith(prefix)
        ]
        count = slots[len(weight.shape)] if isinstance(slots, dict) else slots
        assert len(own) == count, (weight.path, [row.path for row in own])
        for row in own:
            assert row.shape == weight.shape
            assert_bytes(row, names, weight_parts)
            assert_live(live[row.path], row)
    for row in [*by_role["metric"], *by_role["seed"]]:
        assert_bytes(row, names, 1)

    for device in names:
        held = sum(row.device_bytes[device] for row in report.rows)
        assert report.device_bytes[device] == held
    split_bytes = sum(row.bytes for row in report.rows if row.is_split)
    whole_bytes = sum(row.bytes for row in report.rows) - split_bytes
    assert report.split_bytes == split_bytes
    assert report.total_bytes == split_bytes + whole_bytes
    assert set(report.device_bytes) == set(names)
    assert set(report.device_bytes.values()) == {
        split_bytes // parts + whole_bytes
    }

    for path, value in harness.weights_of(model).items():
        harness.log_measurement(
            name, shape, path, harness.difference(value, expected[path])
        )
        np.testing.assert_allclose(
            value, expected[path], rtol=1e-5, atol=1e-5, err_msg=path
        )


@pytest.mark.parametrize(
    "name, factors",
    [
        # Path, then the axes of the variable without its last dim (the row
        # factor) and without its last but one (the column factor).
        (
            "mlp",
            {
                "up/kernel": [(None,), ("model",)],
                "down/kernel": [("model",), (None,)],
            },
        ),
        (
            "multi_head_attention",
            {
                "attention/query/kernel": [(None, "model"), (None, None)],
                "attention/attention_output/kernel": [
                    ("model", None),
                    ("model", None),
                ],
                "head/kernel": [(None,), (None,)],
            },
        ),
    ],
)
def test_factored_slots_are_split_as_the_dims_they_keep(name, factors):
    case = zoo.CASES[name]

    def optimizer():
        return opt.Adafactor(0.01)

    harness.assert_plain()
    expected = harness.weights_of(train(case, optimizer))
    shape = harness.fitted((1, 4))
    with harness.model_parallel(case.layouts, shape).scope():
        model = train(case, optimizer)
    names = harness.mesh_devices(shape)
    # The paths of the factors are all alike, so the rows go by the order of
    # the variables.
    rows = [r for r in distribution.describe(model).rows if r.role == "slot"]
    rows = dict(zip([id(v) for v in model.optimizer.variables], rows))
    checked = set()
    for variable, row_factor, column_factor in zip(
        model.trainable_variables, model.optimizer._r, model.optimizer._c
    ):
        if variable.path not in factors:
            continue
        checked.add(variable.path)
        for slot, axes in zip(
            (row_factor, column_factor), factors[variable.path]
        ):
            row = rows[id(slot)]
            assert row.shape == tuple(slot.shape)
            assert row.axes == axes, variable.path
            assert_bytes(row, names, shape[1] if any(axes) else 1)
            assert_live(slot, row)
    assert checked == set(factors)
    for path, value in harness.weights_of(model).items():
        if path not in case.zero_gradient:
            np.testing.assert_allclose(
                value, expected[path], rtol=1e-5, atol=1e-5, err_msg=path
            )


@harness.shapes((1, 2), (1, 4))
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_a_device_holds_its_share_of_a_language_model(name, shape):
    case = zoo.CASES[name]
    with harness.model_parallel(case.layouts, shape).scope():
        model = train(case, lambda: opt.Adam(0.001))
    report = distribution.describe(model)
    rows = [row for row in report.rows if row.role in ("weight", "slot")]
    weights = [row for row in rows if row.role == "weight"]
    split = sum(row.bytes for row in weights if row.path in case.split)
    whole = sum(row.bytes for row in weights if row.path not in case.split)
    assert split > 0.9 * (split + whole)
    # Adam: two slots for each weight, and two numbers (on TensorFlow, one of
    # them has eight bytes).
    numbers = [
        row.bytes for row in rows if row.role == "slot" and not row.shape
    ]
    assert len(numbers) == 2
    share = 3 * (split // shape[1] + whole) + sum(numbers)
    for device in harness.mesh_devices(shape):
        assert sum(row.device_bytes[device] for row in rows) == share
