"""Programs of accelerators that are not there: counts, memory, kernels."""

import importlib.util
import json
import subprocess
import sys

import keras
import numpy as np
import pytest

from keras_tp import distribution as dist

BATCH, LENGTH, HIDDEN, HEADS, DEVICES = 8, 256, 512, 8, 8
SIZE = BATCH * LENGTH * HIDDEN * 2
PACKAGES = {"h100": "jax_plugins.xla_cuda12", "v5e": "libtpu"}

on_jax = pytest.mark.skipif(
    keras.config.backend() != "jax", reason="XLA's compilers come with JAX"
)


def is_installed(package):
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:
        return False


def needed(target):
    return pytest.param(
        target,
        marks=pytest.mark.skipif(
            not is_installed(PACKAGES[target]),
            reason=f"pip install '.[jax,ahead]' to compile for {target}",
        ),
    )


def build(depth=1):
    """Blocks of attention and two Dense layers, as in a transformer."""
    x = inputs = keras.Input((LENGTH, HIDDEN))
    for _ in range(depth):
        normed = keras.layers.LayerNormalization()(x)
        x += keras.layers.MultiHeadAttention(HEADS, HIDDEN // HEADS)(
            normed, normed, use_causal_mask=True
        )
        normed = keras.layers.LayerNormalization()(x)
        wide = keras.layers.Dense(4 * HIDDEN, activation="gelu")(normed)
        x += keras.layers.Dense(HIDDEN)(wide)
    outputs = keras.layers.Dense(HIDDEN, name="out")(x)
    return keras.Model(inputs, outputs, name="blocks")


def build_text():
    """Two blocks behind an embedding, in bfloat16."""
    keras.config.set_dtype_policy("mixed_bfloat16")
    try:
        tokens = keras.Input((LENGTH,), dtype="int32")
        x = keras.layers.Embedding(1024, HIDDEN)(tokens)
        for _ in range(2):
            x += keras.layers.Dense(HIDDEN)(
                keras.layers.Dense(4 * HIDDEN, activation="gelu")(
                    keras.layers.LayerNormalization()(x)
                )
            )
        return keras.Model(tokens, x)
    finally:
        keras.config.set_dtype_policy("float32")


def build_halved(depth=1):
    keras.config.set_dtype_policy("mixed_bfloat16")
    try:
        return build(depth)
    finally:
        keras.config.set_dtype_policy("float32")


@on_jax
@pytest.mark.parametrize("target", [needed("h100"), needed("v5e")])
def test_sequence_parallelism_sums_no_activation(target):
    names = [f"cpu:{i}" for i in range(DEVICES)]
    mesh = dist.DeviceMesh((DEVICES,), ["model"], names)
    parallel = dist.TensorParallel(mesh, sequence_parallel=True)
    args = build_text, parallel, target, DEVICES
    report = dist.compile_for(*args, batch_size=BATCH, loss="mse")
    found = {
        kind: (row["count"], row["bytes"])
        for kind, row in report.collectives.items()
    }
    # In each pass two of two blocks, and one of the embedding.
    assert found["all_gather"] == (5, 5 * SIZE)
    assert found["reduce_scatter"] == (5, 5 * SIZE // DEVICES)
    assert found["all_reduce"][1] < SIZE // 10


@on_jax
@pytest.mark.parametrize("target", [needed("h100"), needed("v5e")])
def test_a_block_costs_four_all_reduces(target, tmp_path):
    before = keras.random.uniform((2,), seed=keras.random.SeedGenerator(3))
    report = dist.compile_for(
        build_halved,
        None,
        target,
        DEVICES,
        batch_size=BATCH,
        loss="mse",
        depth=3,
        compiled_depths=(1, 2),
    )
    assert report.collectives_per_layer()["all_reduce"] == 4
    large = report.collectives["all_reduce"]["bytes"]
    # The rest: sums for the loss, and the gradient of the last layer's input.
    assert 3 * 4 * SIZE <= large < (3 * 4 + 2) * SIZE
    assert report.fits
    weights = 3 * (12 * HIDDEN**2 * 4) / DEVICES
    # With two slots of Adam.
    assert report.memory["arguments"] > 3 * weights
    # Forward and backward, of matmuls alone.
    least = 3 * 2 * BATCH * LENGTH * 3 * 12 * HIDDEN**2 / DEVICES
    assert least < sum(report.flops.values()) < 1.5 * least
    if target == "h100":
        assert any("cuDNN" in name for name in report.attention)
    assert json.loads(report.to_json())["target"] == target
    report.to_html(tmp_path / "page.html")
    assert keras.distribution.distribution() is None
    after = keras.random.uniform((2,), seed=keras.random.SeedGenerator(3))
    assert (before == after).all()


@on_jax
@pytest.mark.parametrize("target", [needed("h100")])
def test_projections_beside_a_residual_connection_share_a_sum(target):
    """As in BERT: the input of queries, keys and values is added to later."""

    def build_residual():
        x = inputs = keras.Input((LENGTH, HIDDEN))
        x = keras.layers.Dense(HIDDEN, name="first")(x)
        y = keras.layers.MultiHeadAttention(HEADS, HIDDEN // HEADS)(x, x)
        return keras.Model(inputs, x + y)

    mesh = dist.DeviceMesh((2,), ["model"], ["gpu:0", "gpu:1"])
    plan = dist.plan_sharding(build_residual, mesh)
    report = dist.compile_for(
        build_residual, plan.distribution(), target, batch_size=2, loss="mse"
    )
    assert plan.collectives(2) == {"all_reduce": (2, SIZE)}
    row = report.collectives["all_reduce"]
    assert (row["count"], row["bytes"]) == (2, SIZE)


@on_jax
@pytest.mark.parametrize("target", [needed("h100")])
def test_the_law_holds_at_a_third_depth(target):
    arguments = (None, target, DEVICES)
    kwargs = {"batch_size": BATCH, "loss": "mse"}
    law = dist.compile_for(
        build, *arguments, depth=3, compiled_depths=(1, 2), **kwargs
    )
    real = dist.compile_for(lambda: build(3), *arguments, **kwargs)
    for kind, row in real.collectives.items():
        assert law.collectives[kind]["count"] == row["count"]
        assert law.collectives[kind]["bytes"] == row["bytes"]
    assert law.memory["arguments"] == pytest.approx(
        real.memory["arguments"], rel=0.01
    )
    assert law.peak == pytest.approx(real.peak, rel=0.1)
    assert sum(law.flops.values()) == pytest.approx(
        sum(real.flops.values()), rel=0.01
    )


@on_jax
@pytest.mark.parametrize("target", [needed("h100")])
def test_a_model_that_exists_and_another_distribution(target):
    model = build()
    weights = [w.copy() for w in model.get_weights()]
    mesh = dist.DeviceMesh(
        (DEVICES,), ["batch"], [f"gpu:{i}" for i in range(8)]
    )
    report = dist.compile_for(
        model,
        dist.DataParallel(mesh),
        target,
        batch_size=BATCH,
        optimizer=keras.optimizers.SGD(0.1),
        loss="mse",
    )
    # The gradients of all variables, and a few sums.
    parameters = model.count_params() * 4
    found = sum(row["bytes"] for row in report.collectives.values())
    assert parameters <= found < 1.1 * parameters
    for old, new in zip(weights, model.get_weights()):
        assert (old == new).all()


class Positions(keras.layers.Layer):
    """Adds rows of a table that are the same in each step."""

    def __init__(self, rows):
        super().__init__(name="positions")
        self.rows = rows
        self.table = keras.layers.Embedding(48, HIDDEN, name="table")

    def build(self, shape):
        self.table.build()

    def call(self, x):
        found = keras.ops.reshape(self.table(self.rows), (-1, HIDDEN))
        return x + keras.ops.sum(keras.ops.square(found), 0)


@on_jax
@pytest.mark.parametrize("target", [needed("h100")])
@pytest.mark.parametrize(
    ("rows", "is_predicted"),
    [
        (np.arange(48), False),
        (np.array([[5]]), False),
        (np.arange(20), True),
        (np.array([5, 5]), True),
    ],
)
def test_lookups_of_known_rows_are_as_planned_or_flagged(
    target, rows, is_predicted
):
    def build():
        x = keras.Input((LENGTH, HIDDEN))
        h = keras.layers.LayerNormalization()(Positions(rows)(x))
        h = keras.layers.Dense(4 * HIDDEN, name="up")(h)
        return keras.Model(x, keras.layers.Dense(HIDDEN, name="down")(h))

    mesh = dist.DeviceMesh((1, 2), ["batch", "model"], ["gpu:0", "gpu:1"])
    plan = dist.plan_sharding(build, mesh)
    assert plan["positions/table/embeddings"].is_predicted is is_predicted
    parallel = dist.TensorParallel(plan=plan)
    report = dist.compile_for(
        build, parallel, target, batch_size=BATCH, loss="mse"
    )
    found = {
        kind: (row["count"], row["bytes"])
        for kind, row in report.collectives.items()
    }
    assert (found == plan.collectives(BATCH)) is is_predicted


# In a process of its own, as the compiler for TPUs is loaded once.
TPU_SCRIPT = """
import os
import sys
import jax
from keras_tp.backend.jax import ahead_of_time

before = dict(os.environ)
mesh = ahead_of_time.mesh("v5e", (2, 4), ["batch", "model"])
changed = set(before.items()) ^ set(os.environ.items())
names = sorted({name for name, _ in changed} - {"TPU_LIBRARY_PATH"})
print(mesh.devices.size, names, flush=True)
sys.stdin.read()
"""


@on_jax
@pytest.mark.skipif(
    not is_installed("libtpu"), reason="pip install '.[jax,ahead]'"
)
def test_without_a_tpu_two_processes_compile_for_one():
    started = [
        subprocess.Popen(
            [sys.executable, "-c", TPU_SCRIPT],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    try:
        # Each has its compiler until its input ends.
        lines = [process.stdout.readline() for process in started]
        errors = [process.communicate(timeout=300)[1] for process in started]
    finally:
        for process in started:
            process.kill()
    assert lines == 2 * ["8 []\n"], errors
    for error in errors:
        assert "TPU_ACCELERATOR_TYPE" not in error
        assert "TPU_WORKER_HOSTNAMES" not in error


@on_jax
def test_a_missing_compiler_is_named(monkeypatch):
    from jax._src import xla_bridge

    monkeypatch.setattr(xla_bridge, "get_tpu_library_path", lambda: None)
    with pytest.raises(ImportError, match=r"pip install 'keras_tp\[jax,ahead"):
        dist.compile_for(build, None, "v5e", 8, batch_size=8, loss="mse")


@on_jax
@pytest.mark.parametrize(
    ["arguments", "message"],
    [
        ({"target": "h1000"}, "`target` must be one of"),
        ({"count": 12, "target": "v5e"}, "power of two"),
        ({"count": 20}, "nodes of 8"),
        ({"model_or_build_fn": 3}, "takes a Keras model"),
        ({"depth": 4, "compiled_depths": (2, 2)}, "two increasing"),
        ({"distribution": 5}, "must be a distribution"),
    ],
)
def test_bad_arguments(arguments, message):
    if "count" in arguments and not is_installed("libtpu"):
        pytest.skip("pip install '.[jax,ahead]'")
    given = {
        "model_or_build_fn": build,
        "distribution": None,
        "target": "h100",
        "count": None,
        "batch_size": 8,
        "loss": "mse",
        **arguments,
    }
    with pytest.raises(ValueError, match=message):
        dist.compile_for(**given)


@on_jax
def test_the_count_is_that_of_the_mesh():
    mesh = dist.DeviceMesh((2,), ["model"], ["gpu:0", "gpu:1"])
    with pytest.raises(ValueError, match="has 2 devices"):
        dist.compile_for(
            build,
            dist.TensorParallel(mesh),
            "h100",
            8,
            batch_size=8,
            loss="mse",
        )


@pytest.mark.skipif(keras.config.backend() == "jax", reason="works on JAX")
def test_other_backends_are_refused():
    with pytest.raises(ValueError, match="backend 'jax' only"):
        dist.compile_for(build, None, "h100", 8, batch_size=8, loss="mse")
