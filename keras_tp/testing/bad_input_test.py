"""Errors name the variable, the dim, the sizes and the way out."""

import keras
import pytest
from keras import layers

import keras_tp
from keras_tp import distribution
from keras_tp.testing import models


def kernel(axes, units=8):
    layout_map = distribution.LayoutMap(models.mesh())
    layout_map[".*up/kernel"] = axes
    with distribution.ModelParallel(layout_map=layout_map).scope():
        inputs = keras.Input((4,))
        return keras.Model(inputs, layers.Dense(units, name="up")(inputs))


def test_a_layout_of_another_rank():
    with pytest.raises(ValueError, match="up/kernel.*rank 2.*rank 3"):
        kernel((None, "model", None))


def test_a_dim_that_the_devices_do_not_divide():
    with pytest.raises(ValueError, match="Dim 1.*up/kernel.*size 7"):
        kernel((None, "model"), units=7)


def test_an_axis_that_the_mesh_does_not_have():
    with pytest.raises(ValueError, match="rows"):
        kernel((None, "rows"))


def test_a_mesh_of_more_devices_than_there_are():
    count = len(distribution.list_devices())
    with pytest.raises(ValueError):
        distribution.DeviceMesh((1, 2 * count), ["batch", "model"])


def test_a_mesh_is_no_distribution():
    keras_tp.install()
    for module in (distribution, keras.distribution):
        with pytest.raises(ValueError, match="DeviceMesh"):
            module.set_distribution(models.mesh())
