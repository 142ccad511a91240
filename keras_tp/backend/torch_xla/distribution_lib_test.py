"""Where tensors are: on all devices, on one CPU, and in parts."""

import os
import subprocess
import sys

import keras
import numpy as np
import pytest
from keras.src.backend.torch import core

from keras_tp import distribution
from keras_tp.backend import distribution_lib as lib
from keras_tp.backend.torch_xla import devices

DEVICES = distribution.get_device_count()


def parallel(axes, uneven=False):
    mesh = distribution.DeviceMesh((1, DEVICES), ["batch", "model"])
    layout = distribution.TensorLayout(axes, mesh)
    layout.uneven = uneven
    layout_map = distribution.LayoutMap(mesh)
    layout_map["table"] = layout
    return distribution.ModelParallel(layout_map=layout_map)


def table(axes, shape, uneven=False):
    value = np.arange(np.prod(shape), dtype="float32").reshape(shape)
    with parallel(axes, uneven).scope():
        return keras.Variable(value, name="table"), value


def test_models_without_a_distribution_are_where_torch_makes_them():
    assert core.get_device() == core.DEFAULT_DEVICE
    with parallel(("model", None)).scope():
        assert core.get_device() == "xla"
        with core.device_scope("cpu"):
            assert core.get_device() == "cpu"
    assert core.get_device() == core.DEFAULT_DEVICE
    one = distribution.DataParallel(devices=["cpu:0"])
    with one.scope():
        assert core.get_device() == core.DEFAULT_DEVICE


@pytest.mark.parametrize("axes", [("model", None), (None, "model")])
def test_parts_of_different_sizes(axes):
    shape = 2 * DEVICES - 1, 3 * DEVICES - 2
    variable, value = table(axes, shape, uneven=True)
    np.testing.assert_array_equal(keras.ops.convert_to_numpy(variable), value)
    assert lib.variable_axes(variable) == axes

    def of(ranges):
        return tuple(slice(*limits[0]) for limits in ranges)

    parts = lib.variable_parts(variable)
    assert len(parts) == DEVICES
    assert len({read().shape for _, _, read in parts}) == 2
    for ranges, _, read in parts:
        np.testing.assert_array_equal(read(), value[of(ranges)])
    lib.assign_parts(variable, lambda ranges: value[of(ranges)] + 1)
    np.testing.assert_array_equal(
        keras.ops.convert_to_numpy(variable), value + 1
    )
    assert lib.variable_axes(variable) == axes


@pytest.mark.parametrize("by", ["assign", "assign_add", "tensor"])
def test_a_variable_stays_split(by):
    shape = 2 * DEVICES, 3
    variable, value = table(("model", None), shape)
    if by == "assign":
        variable.assign(2 * value)
    elif by == "assign_add":
        variable.assign_add(value)
    else:
        with parallel(("model", None)).scope():
            variable.assign(keras.ops.convert_to_tensor(value) * 2)
    assert lib.variable_axes(variable) == ("model", None)
    held = lib.variable_bytes_by_device(variable)
    assert held == dict.fromkeys(devices.names(), value.nbytes // DEVICES)
    np.testing.assert_array_equal(
        keras.ops.convert_to_numpy(variable), 2 * value
    )


def test_a_mesh_holds_all_devices():
    names = distribution.list_devices()[:2]
    if len(names) == DEVICES:
        pytest.skip("a mesh of two devices holds all of them")
    mesh = distribution.DeviceMesh((2,), ["model"], names)
    with pytest.raises(ValueError, match="hold all"):
        _ = mesh.backend_mesh


def test_devices_that_are_not_there():
    with pytest.raises(ValueError, match="no devices of type 'tpu'"):
        distribution.list_devices("tpu")


def test_numbers_of_dropout_are_those_of_one_device():
    x = np.ones((2 * DEVICES, 12), "float32")

    def run():
        layer = keras.layers.Dropout(0.5, seed=3)
        return keras.ops.convert_to_numpy(layer(x, training=True))

    expected = run()
    assert 0 < np.mean(expected == 0) < 1
    with parallel(("model", None)).scope():
        np.testing.assert_array_equal(run(), expected)


TRAINED_BEFORE = """
import keras
from keras_tp import distribution as dist

x = keras.ops.ones((8, 4)).numpy()
for count in (1, 2):
    inputs = keras.Input((4,))
    if count > 1:
        mesh = dist.DeviceMesh((1, count), ["batch", "model"])
        dist.set_distribution(dist.TensorParallel(mesh))
    model = keras.Model(inputs, keras.layers.Dense(8 * count)(inputs))
    model.compile("sgd", "mse")
    print(model.train_on_batch(x, keras.ops.ones((8, 8 * count)).cpu()))
"""


def test_a_process_that_has_trained_before_there_was_a_mesh():
    """torch fixes the kinds of devices at the first gradient."""
    done = subprocess.run(
        [sys.executable, "-c", TRAINED_BEFORE],
        env={**os.environ, "CPU_NUM_DEVICES": "2"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 2
