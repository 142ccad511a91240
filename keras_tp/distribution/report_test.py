import json

import keras
import numpy as np
import pytest
from keras import layers

from integration_tests import harness
from keras_tp import distribution as dist
from keras_tp.distribution.report import ShardingReport
from keras_tp.distribution.report import VariableReport


def model_parallel(patterns, *shape):
    layout_map = dist.LayoutMap(harness.mesh(harness.fitted(shape)))
    for pattern, axes in patterns.items():
        layout_map[pattern] = axes
    return dist.ModelParallel(layout_map=layout_map)


def mlp():
    model = keras.Sequential(
        [
            keras.Input((6,)),
            layers.Dense(12, name="up"),
            layers.Dropout(0.5, name="drop"),
            layers.Dense(4, name="down"),
        ],
        name="net",
    )
    model.compile(keras.optimizers.Adam(0.01), "mse")
    return model


X, Y = np.ones((4, 6), "float32"), np.ones((4, 4), "float32")
PATTERNS = {".*up/kernel": (None, "model"), ".*up/bias": (None,)}


def test_rows_are_read_from_the_live_arrays():
    with model_parallel(PATTERNS, 1, 2).scope():
        model = mlp()
        model.fit(X, Y, verbose=0)
    report = dist.describe(model)
    row = report["net/up/kernel"]
    assert (row.role, row.shape, row.dtype) == ("weight", (6, 12), "float32")
    assert row.axes == (None, "model")
    assert row.bytes == 288
    names = harness.mesh_devices(harness.fitted((1, 2)))
    assert row.device_bytes == dict.fromkeys(names, 288 // len(names))
    assert row.is_split and row.why == ""
    moved = dist.DataParallel(devices=["cpu:1"])
    dist.distribute_model(model, moved)
    assert dist.describe(model)["net/up/kernel"].device_bytes == {"cpu:1": 288}


def test_totals_are_the_sums_of_the_rows():
    with model_parallel(PATTERNS, 1, 4).scope():
        model = mlp()
        model.fit(X, Y, verbose=0)
    report = dist.describe(model)
    assert report.total_bytes == sum(row.bytes for row in report.rows)
    for device, held in report.device_bytes.items():
        assert held == sum(r.device_bytes[device] for r in report.rows)
    # The kernel and its two slots.
    assert report.split_bytes == 3 * 288
    whole = report.total_bytes - report.split_bytes
    count = harness.fitted((1, 4))[1]
    assert set(report.device_bytes.values()) == {whole + 3 * 288 // count}
    assert len(report.replicated) == len(report.rows) - 3


def test_why_a_variable_is_replicated():
    with model_parallel(PATTERNS, 1, 2).scope():
        model = mlp()
        model.fit(X, Y, verbose=0)
    report = dist.describe(model)
    why = {row.path: row.why for row in report.rows}
    assert why["net/down/kernel"] == "no pattern matches"
    assert why["net/up/bias"] == "the layout of '.*up/bias' replicates it"
    roles = {row.role: row.why for row in report.replicated}
    assert roles["metric"] == "metrics are replicated"
    assert roles["seed"] == "random state is replicated"
    assert "its variable is replicated" in roles["slot"]
    with dist.DataParallel().scope():
        row = dist.describe(mlp())["net/up/kernel"]
    assert row.why == "data parallelism replicates variables"


def test_a_plain_model():
    row = dist.describe(mlp())["net/up/kernel"]
    assert row.axes is None
    # That of this process, where there are several.
    (device,) = row.device_bytes
    assert row.device_bytes == {device: 288}
    assert device in dist.list_devices()
    assert row.why == "the model has no distribution"


def test_printed_and_as_json():
    with model_parallel(PATTERNS, 1, 2).scope():
        model = mlp()
    report = dist.describe(model)
    text = str(report)
    for part in (
        "net/up/kernel",
        "(6, 12)",
        "(None, 'model')",
        "2 devices",
        "B",
    ):
        assert part in text
    assert max(len(line) for line in text.splitlines()) <= 120
    assert "% of the bytes split" in repr(report)
    assert json.loads(json.dumps(report.to_dict()))["model"] == "net"
    with pytest.raises(KeyError, match="net/up/karnel"):
        report["net/up/karnel"]


def test_the_last_lines_say_what_each_device_holds():
    def last(*held):
        devices = {f"cpu:{k}": size for k, size in enumerate(held)}
        row = VariableReport(
            *("net/kernel", "weight", (4, 4), "float32", ("model", None), 64),
            *(devices, ""),
        )
        text = str(ShardingReport("net", [row]))
        return text.rpartition("-\n")[2].splitlines()

    assert last(64) == ["cpu:0 holds all variables: 64 B."]
    assert last(32, 32) == [
        "Each of 2 devices holds 32 B. All variables together have 64 B."
    ]
    assert last(48, 16) == [
        "cpu:0 holds 48 B.",
        "cpu:1 holds 16 B.",
        "All variables together have 64 B.",
    ]


def test_slots_are_a_column_or_rows():
    with model_parallel(PATTERNS, 1, 2).scope():
        model = mlp()
        model.fit(X, Y, verbose=0)
    report = dist.describe(model)
    slots = [r for r in report.rows if r.slot_of == "net/up/kernel"]
    assert [r.role for r in slots] == ["slot", "slot"]
    text = str(report)
    held = 288 // harness.fitted((1, 2))[1]
    (line,) = [x for x in text.splitlines() if "net/up/kernel" in x]
    assert f"2 x {held} B" in line
    assert slots[0].path not in text
    said = " ".join(text.split())
    assert "2 of metrics" in said and "2 of the optimizer), together" in said
    assert "`describe(model, slots=True)` lists them." in said
    # The data has all, whatever is printed.
    every = dist.describe(model, slots=True)
    assert every.rows == report.rows
    for row in every.rows:
        assert row.path in str(every)
    assert "Not listed" not in str(every)


def test_repeated_layers_are_grouped(monkeypatch):
    rows = [
        VariableReport(
            *(f"net/block_{n}/{name}/kernel", "weight", (64, 64), "float32"),
            *((None, "model"), 16384, {"cpu:0": 8192, "cpu:1": 8192}, ""),
        )
        for n in range(12)
        for name in ("up", "down")
    ]
    report = ShardingReport("net", rows)
    for width in (80, 120):
        monkeypatch.setenv("COLUMNS", str(width))
        lines = str(report).splitlines()
        assert max(map(len, lines)) <= width
        assert "12 x net/block_[0-11]" in lines
        assert sum("kernel" in line for line in lines) == 2
    # One that holds more has a row of its own.
    held = {"cpu:0": 16384, "cpu:1": 16384}
    rows[6] = rows[6]._replace(device_bytes=held, axes=(None, None))
    assert "net/block_3/up/kernel" in str(report)


def test_slots_that_are_split_further():
    weight = VariableReport(
        *("net/kernel", "weight", (4, 4), "float32", (None, None)),
        *(64, {"cpu:0": 64, "cpu:1": 64}, "replicated"),
    )
    slot = weight._replace(
        path="adam/kernel_momentum",
        role="slot",
        axes=("batch", None),
        device_bytes={"cpu:0": 32, "cpu:1": 32},
        slot_of="net/kernel",
    )
    text = str(ShardingReport("net", [weight, slot]))
    assert "32 B, split further" in text


def test_count_collectives_changes_nothing():
    with model_parallel(PATTERNS, 1, 2).scope():
        model = mlp()
    model.fit(X, Y, verbose=0)

    def state():
        variables = model.variables + model.optimizer.variables
        return [np.array(v) for v in variables + model.metrics_variables]

    before = state()
    counts = dist.count_collectives(model, X, Y)
    assert counts["all_gather"][0] + counts["all_reduce"][0] > 0
    for old, new in zip(before, state()):
        np.testing.assert_array_equal(old, new)


def test_count_collectives_builds_what_is_not_built():
    with model_parallel({".*up/kernel": ("model", None)}, 1, 2).scope():
        model = keras.Sequential([layers.Dense(4, name="up")])
        model.compile("sgd", "mse")
        x = np.ones((4, 8), "float32")
        counts = dist.count_collectives(model, x, Y)
    # The row-parallel product of a batch of 4 by 4 outputs.
    assert counts["all_reduce"] == (1, 4 * 4 * 4)
    assert dist.count_collectives(model, x)["all_reduce"] == (1, 4 * 4 * 4)


def test_a_plain_model_communicates_nothing():
    counts = dist.count_collectives(mlp(), X, Y)
    assert set(counts) == {
        "all_reduce",
        "all_gather",
        "reduce_scatter",
        "all_to_all",
        "collective_permute",
    }
    assert set(counts.values()) == {(0, 0)}
