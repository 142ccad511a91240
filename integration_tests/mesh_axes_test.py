"""Layouts over meshes of one to three axes, in any order, as on one device."""

import functools
import math

import keras
import numpy as np
import pytest
from keras import layers

from integration_tests import harness
from keras_tp import distribution as dist

SAMPLES, STEPS, FEATURES = 8, 6, 12


def meshes():
    """Yields a shape and axis names for each mesh over the devices there are.

    On torch a mesh holds all of them.
    """
    count = min(dist.get_device_count(), 4)
    rest = count // 2
    found = [
        ((count,), ("model",)),
        ((1, 2, rest), ("batch", "model", "x")),
        ((2, 1, rest), ("batch", "model", "x")),
        ((rest, 2, 1), ("batch", "model", "x")),
        ((rest, 2), ("batch", "model")),
        ((2, rest), ("model", "batch")),
        ((rest, 2), ("x", "model")),
    ]
    return [
        pytest.param(*mesh, id=" ".join(f"{n}{s}" for s, n in zip(*mesh)))
        for mesh in found
    ]


def layouts(kind, names):
    """Returns a dict of pattern to layout; axes that are not there are `None`.

    Args:
        kind: String: `"all"` splits two dims of a kernel over two axes,
            `"pair"` makes a column and a row, `"outputs"` splits what layers
            return.
    """
    batch = "batch" if "batch" in names else None
    other = "x" if "x" in names else batch
    return {
        "all": {
            ".*(up|down)/kernel": (other, "model"),
            ".*mid/kernel": ("model", other),
            ".*conv/kernel": (None, other, "model"),
        },
        "pair": {
            ".*up/kernel": (None, "model"),
            ".*up/bias": ("model",),
            ".*mid/kernel": ("model", None),
            ".*conv/kernel": (None, "model", None),
        },
        "outputs": {
            ".*(up|mid|down)/kernel": (None, "model"),
            ".*up/output": (batch, None, "model"),
        },
    }[kind]


def trained():
    keras.utils.set_random_seed(3)
    model = keras.Sequential(
        [
            keras.Input((STEPS, FEATURES)),
            layers.Dense(16, "relu", name="up"),
            layers.LayerNormalization(name="norm"),
            layers.Dense(16, name="mid"),
            layers.Conv1D(16, 3, padding="same", name="conv"),
            layers.GlobalAveragePooling1D(),
            layers.Dense(4, name="down"),
        ]
    )
    model.compile(keras.optimizers.Adam(0.01, epsilon=1e-3), "mse")
    rng = np.random.default_rng(0)
    x = rng.normal(size=(SAMPLES, STEPS, FEATURES)).astype("float32")
    y = rng.normal(size=(SAMPLES, 4)).astype("float32")
    losses = [np.ravel(model.train_on_batch(x, y))[0] for _ in range(4)]
    return model, losses + [float(np.sum(model.predict(x, verbose=0)))]


@functools.cache
def expected():
    harness.assert_plain()
    return trained()[1]


@pytest.mark.parametrize("shape, names", meshes())
def test_a_plan(shape, names):
    mesh = harness.mesh(shape, names)
    want = expected()
    with dist.TensorParallel(mesh).scope():
        model, found = trained()
    np.testing.assert_allclose(found, want, rtol=1e-5, atol=1e-5)
    report = dist.describe(model)
    is_split = dict(zip(names, shape))["model"] > 1
    assert (report.split_bytes > report.total_bytes / 2) == is_split


@pytest.mark.parametrize(
    "kind",
    [
        "all",
        pytest.param("pair", marks=pytest.mark.slow),
        pytest.param("outputs", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("shape, names", meshes())
def test_declared_layouts(shape, names, kind):
    mesh = harness.mesh(shape, names)
    want = expected()
    layout_map = dist.LayoutMap(mesh)
    for pattern, axes in layouts(kind, names).items():
        layout_map[pattern] = axes
    parallel = dist.ModelParallel(
        layout_map=layout_map,
        batch_dim_name="batch" if "batch" in names else names[0],
    )
    with parallel.scope():
        model, found = trained()
    np.testing.assert_allclose(found, want, rtol=1e-5, atol=1e-5)
    rows = dist.describe(model).rows
    row = next(row for row in rows if row.path.endswith("up/kernel"))
    axes = next(iter(layouts(kind, names).values()))
    parts = math.prod(n for name, n in zip(names, shape) if name in axes)
    assert set(row.device_bytes.values()) == {row.bytes // parts}
