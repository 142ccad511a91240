import warnings

import numpy as np
import pytest

from keras_tp.distribution import device_mesh
from keras_tp.distribution.device_mesh import DeviceMesh


def names(count, kind="cpu"):
    return [f"{kind}:{index}" for index in range(count)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((4, ["model"], names(4)), r"write `\(4,\)` for one axis"),
        (((4,), "model", names(4)), r"write `\['model'\]` for one axis"),
        (((2, 2), ["a", "b"], names(3)), "has 4 devices, and 3 are listed"),
        (((2,), ["model"], ["cpu:0", "CPU:0"]), "Repeated: .'cpu:0'"),
        (((1,), ["model"], ["cpu"]), "Unknown device 'cpu'"),
        (((1,), ["model"], []), "must be a list of names"),
        (((4,), ["model"], "cpu:0"), "must be a list of names"),
    ],
)
def test_what_makes_no_mesh(arguments, message):
    with pytest.raises(ValueError, match=message):
        DeviceMesh(*arguments)


def test_devices_of_another_machine_are_looked_up_when_they_are_used():
    mesh = DeviceMesh((2,), ["model"], names(2, "tpu"))
    for _ in range(2):
        with pytest.raises(ValueError, match="only .'cpu:0'"):
            device_mesh.check_devices_of(mesh)
    with pytest.raises(ValueError, match="other devices is for plans only"):
        _ = mesh.backend_mesh


def test_a_list_of_devices_may_be_an_array():
    assert device_mesh.listed_devices(np.array(names(2))) == names(2)


def test_a_mesh_of_the_only_device_is_said_once(monkeypatch):
    monkeypatch.setattr(device_mesh, "_said_alone", [])
    lib = device_mesh.backend.distribution_lib
    monkeypatch.setattr(lib, "list_devices", lambda kind=None: ["cpu:0"])
    listed = DeviceMesh((1,), ["model"], ["cpu:0"])
    found = DeviceMesh((1,), ["model"])
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for mesh in (listed, found, found):
            device_mesh.say_if_alone(mesh)
    (one,) = said
    assert "one device here, 'cpu:0'" in str(one.message)


@pytest.mark.parametrize(
    ("shape", "axes", "advice"),
    [
        ((4, 1), ["model"], r"DeviceMesh\(\(1, 4\), \['batch', 'model'\]\)"),
        ((4, 1), [], r"DeviceMesh\(\(4,\), \['model'\]\)"),
    ],
)
def test_a_mesh_that_splits_no_variable(shape, axes, advice):
    mesh = DeviceMesh(shape, ["batch", "model"], names(4))
    with pytest.warns(UserWarning, match=advice):
        device_mesh.warn_if_unsplit(mesh, axes)


def test_one_device_splits_nothing_and_that_is_meant():
    mesh = DeviceMesh((1, 1), ["batch", "model"], names(1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        device_mesh.warn_if_unsplit(mesh, ["model"])
