"""Values get the layout that is asked for, and keep their numbers."""

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.experimental import dtensor

import keras_tp
from keras_tp import distribution as dist
from keras_tp.backend.tensorflow import placement

VALUE = np.arange(24, dtype="float32").reshape(4, 6)


def mesh_of(axes):
    keras_tp.install()
    devices = dist.list_devices()[:4]
    return dist.DeviceMesh((2, 2), axes, devices).backend_mesh


def layout(mesh, *specs):
    names = [dtensor.UNSHARDED if axis is None else axis for axis in specs]
    return dtensor.Layout(names, mesh)


@pytest.mark.parametrize("before", [(None, None), ("a", None), ("b", "a")])
@pytest.mark.parametrize("after", [(None, None), ("a", "b"), (None, "a")])
def test_a_tensor_moves_to_another_layout(before, after):
    mesh = mesh_of(["a", "b"])
    x = placement.place(VALUE, layout(mesh, *before))
    wanted = layout(mesh, *after)
    with placement.on_mesh(mesh):
        traced = tf.function(lambda x: placement.place(x, wanted))(x)
    for moved in (placement.place(x, wanted), traced):
        assert dtensor.fetch_layout(moved) == wanted
        np.testing.assert_array_equal(placement.read(moved), VALUE)


def test_a_tensor_moves_to_another_mesh():
    x = placement.place(VALUE, layout(mesh_of(["a", "b"]), "a", "b"))
    wanted = layout(mesh_of(["c", "d"]), "c", None)
    moved = placement.place(x, wanted)
    assert dtensor.fetch_layout(moved) == wanted
    np.testing.assert_array_equal(placement.read(moved), VALUE)


def test_parts_are_those_of_the_devices():
    x = placement.place(VALUE, layout(mesh_of(["a", "b"]), "b", "a"))
    parts = placement.local_parts(x)
    assert len(parts) == 4
    for device, slices, array in parts:
        expected = VALUE[tuple(slice(*ends) for ends in slices)]
        assert array.shape == (2, 3)
        np.testing.assert_array_equal(array, expected)
        a, b = divmod(device, 2)
        assert slices == ((2 * b, 2 * b + 2), (3 * a, 3 * a + 3))
