import keras
import pytest

from keras_tp import distribution as dist
from keras_tp.distribution import arguments


@pytest.fixture
def mesh():
    return dist.DeviceMesh((2,), ["model"], ["tpu:0", "tpu:1"])


@pytest.mark.parametrize(
    ("value", "advice"),
    [
        (dist.TensorParallel, r"`TensorParallel\(\)`: an instance"),
        (dist.ModelParallel, r"`ModelParallel\(layout_map=layout_map\)`: an"),
        (dist.LayoutMap(None), r"`ModelParallel\(layout_map=layout_map\)`\."),
        (4, "first n=4 devices"),
        (["cpu:0", "cpu:1"], r"DeviceMesh\(\(2,\)"),
        ("auto", r"`TensorParallel\(\)` for a plan"),
        (True, "Received: distribution=True"),
    ],
)
def test_an_error_says_what_to_write_in_place_of_a_value(value, advice):
    with pytest.raises(ValueError, match=advice):
        arguments.check_distribution(value)


@pytest.mark.parametrize("value", [True, -1, 0.5, "1 MiB", [1]])
def test_bytes_that_are_no_number(value, mesh):
    with pytest.raises(ValueError, match=r"gather none\.(.*)Received: gather"):
        dist.plan_sharding(lambda: keras.Model(), mesh, gather_outputs=value)


def test_a_model_or_a_mesh_in_place_of_a_distribution(mesh):
    with pytest.raises(ValueError, match=r"DataParallel\(device_mesh\)"):
        arguments.check_distribution(mesh)
    with pytest.raises(ValueError, match=r"distribute_model\(model, Tensor"):
        arguments.check_distribution(keras.layers.Dense(1))


def test_a_distribution_on_devices_of_another_machine(mesh):
    layout_map = dist.LayoutMap(mesh)
    distribution = dist.ModelParallel(layout_map=layout_map)
    with pytest.raises(ValueError, match="no devices of type 'tpu' here"):
        arguments.check_distribution(distribution)


def test_meshes_and_their_axes(mesh):
    arguments.check_mesh(mesh)
    arguments.check_batch_axis(mesh, "model")
    with pytest.raises(ValueError, match=r"Received: device_mesh=\(1, 2\)"):
        arguments.check_mesh((1, 2))
    with pytest.raises(ValueError, match=r"axes \['model'\].*'batch'"):
        arguments.check_batch_axis(mesh, "batch")


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (None, "needs none. Received: layout_map=None"),
        ({}, r"layout_map.update\(...\)` with this dict"),
        (dist.LayoutMap(None), r"needs a mesh: write `LayoutMap\(device_mesh"),
    ],
)
def test_layout_maps(value, message):
    with pytest.raises(ValueError, match=message):
        arguments.check_layout_map(value)


def test_models():
    arguments.check_model(keras.layers.Dense(1), "distribute_model")
    with pytest.raises(
        ValueError, match="`distribute_model` takes an existing"
    ):
        arguments.check_model(keras.Sequential, "distribute_model")
