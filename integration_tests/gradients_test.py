"""Gradients: sums over devices, clipping, and the bytes on each device.

README.md of this folder names the row that each test shows.
"""

import functools

import keras
import numpy as np
import pytest

from integration_tests import harness
from integration_tests import zoo
from keras_tp import TensorParallelKeras
from keras_tp import distribution

CLIPNORM = 0.05
LAYERS = list(zoo.CASES)[: list(zoo.CASES).index("opt")]
SHAPES = harness.shapes((1, 2), (1, 4), (2, 2))


def gradients(case, model):
    """One step whose update is the gradient, clipped by its global norm."""
    optimizer = keras.optimizers.SGD(1.0, global_clipnorm=CLIPNORM)
    model.compile(optimizer, case.loss)
    trained = {variable.path for variable in model.trainable_variables}
    before = harness.weights_of(model)
    model.train_on_batch(*harness.data_of(case))
    after = harness.weights_of(model)
    return {path: before[path] - after[path] for path in trained}


@functools.cache
def of_one_device(name):
    harness.assert_plain()
    case = zoo.CASES[name]
    return gradients(case, harness.build(case))


@SHAPES
@pytest.mark.parametrize("name", LAYERS)
def test_clipped_gradients_of_every_kind_of_layer(name, shape):
    """Rows A.10 and B.9: put together they are those of one device."""
    case = zoo.CASES[name]
    want = of_one_device(name)
    norm = np.sqrt(sum(np.sum(np.square(g)) for g in want.values()))
    # It was clipped: the norm is that of the gradient of the whole model.
    np.testing.assert_allclose(norm, CLIPNORM, rtol=1e-3)
    with harness.model_parallel(case.layouts, shape).scope():
        model = harness.build(case)
    got = gradients(case, model)
    assert harness.split_paths(model) == case.split
    assert got.keys() == want.keys()
    for path, gradient in want.items():
        np.testing.assert_allclose(got[path], gradient, atol=1e-6, err_msg=path)


@harness.shapes((2,), (4,))
def test_what_is_reported_is_what_lies_there(shape):
    """Also after a variable was moved behind the report's back."""
    harness.mesh(shape, ["model"])
    case = zoo.CASES["mlp"]
    model = harness.build(case)
    model.compile("adam", case.loss)
    model = TensorParallelKeras(model, world_size=shape[0])
    model.train_on_batch(*harness.data_of(case))
    info = model.get_gradient_sharding_info()
    devices = distribution.list_devices()[: shape[0]]
    for row in info["variables"]:
        parts = shape[0] if any(row["axes"]) else 1
        held = dict.fromkeys(devices, row["bytes"] // parts)
        assert row["device_bytes"] == held
    for device in devices:
        assert info["device_bytes"][device] == sum(
            row["device_bytes"][device] for row in info["variables"]
        )
    assert info["total_bytes"] == sum(r["bytes"] for r in info["variables"])
    split = {row["path"] for row in info["variables"] if any(row["axes"])}
    assert "up/kernel" in split
    whole = distribution.DataParallel(devices=devices)
    distribution.distribute_model(model, whole)
    info = model.get_parallelism_info()
    assert not any(any(row["axes"]) for row in info["variables"])
    assert info["device_bytes"][devices[0]] == info["total_bytes"]


@harness.shapes((1, 2), (1, 4))
def test_tensor_parallelism_gathers_and_scatters_nothing(shape):
    case = zoo.CASES["multi_head_attention"]
    x, y = harness.data_of(case)
    with harness.model_parallel(case.layouts, shape).scope():
        model = harness.build(case)
    model.compile("adam", case.loss)
    for step in ((x,), (x, y)):
        found = distribution.count_collectives(model, *step)
        sent = {name for name, (count, _) in found.items() if count}
        assert sent == {"all_reduce"}
