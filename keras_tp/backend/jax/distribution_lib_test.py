import jax
import keras
import numpy as np
import pytest

import keras_tp
from keras_tp import distribution as dist
from keras_tp.backend.jax import batches
from keras_tp.backend.jax import distribution_lib as lib


@pytest.fixture
def mesh():
    devices = dist.list_devices()[:4]
    return dist.DeviceMesh((2, 2), ["batch", "model"], devices)


def test_devices():
    assert lib.list_devices("cpu") == [f"cpu:{d.id}" for d in jax.devices()]
    assert lib.get_device_count() == jax.device_count()
    with pytest.raises(ValueError, match="'abacus'"):
        lib.list_devices("abacus")


@pytest.mark.parametrize(
    "size, spec", [(4, ("batch", None)), (6, ("batch", None)), (5, ())]
)
def test_a_batch_that_does_not_divide_is_replicated(mesh, size, spec):
    batch = np.arange(size * 3, dtype="float32").reshape(size, 3)
    layout = dist.TensorLayout(("batch", None), mesh)
    placed = lib.distribute_data_input(batch, layout, "batch")
    np.testing.assert_array_equal(placed, batch)
    assert placed.sharding.is_equivalent_to(
        jax.sharding.NamedSharding(
            mesh.backend_mesh, jax.sharding.PartitionSpec(*spec)
        ),
        ndim=2,
    )


def test_batch_layout_leaves_other_shardings_alone():
    one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    assert batches.fitting_sharding((3,), one) is one


def test_relayout_keeps_the_value_and_frees_the_old_shards(mesh):
    variable = keras.Variable(np.arange(24.0).reshape(4, 6), dtype="float32")
    old = variable._value
    layout = dist.TensorLayout((None, "model"), mesh)
    lib.relayout_variable(variable, layout)
    assert lib.variable_axes(variable) == (None, "model")
    assert lib.variable_bytes_by_device(variable) == {
        f"cpu:{i}": 4 * 3 * 4 for i in range(4)
    }
    np.testing.assert_array_equal(variable.value, old)
    lib.relayout_variable(variable, None)
    assert variable._layout is None
    assert lib.variable_axes(variable) is None
    # Not tied to its device: it may meet arrays of any other.
    assert not variable._value.committed
    np.testing.assert_array_equal(variable.value, old)


def test_axes_are_padded_to_the_rank(mesh):
    variable = keras.Variable(np.ones((4, 6, 2)), dtype="float32")
    lib.relayout_variable(
        variable, dist.TensorLayout(("model", None, None), mesh)
    )
    assert lib.variable_axes(variable) == ("model", None, None)


def test_random_numbers_that_depend_on_the_devices_are_refused():
    try:
        jax.config.update("jax_threefry_partitionable", False)
        with pytest.raises(ValueError, match="jax_threefry_partitionable"):
            keras_tp.install()
    finally:
        jax.config.update("jax_threefry_partitionable", True)
    keras_tp.install()


@pytest.mark.parametrize(
    "flags, want",
    [
        ("", "--xla_force_host_platform_device_count=3"),
        (
            "--a=1 --xla_force_host_platform_device_count=8",
            "--a=1 --xla_force_host_platform_device_count=3",
        ),
    ],
)
def test_xla_flags_keep_what_the_user_set(flags, want):
    assert lib._xla_flags(flags, 3).startswith(want)
    timeout = "--xla_cpu_collective_call_terminate_timeout_seconds"
    assert f"{timeout}=600" in lib._xla_flags(flags, 3)
    assert f"{timeout}=600" not in lib._xla_flags(f"{timeout}=5", 3)


def test_xla_gets_no_flags_that_it_does_not_know(monkeypatch):
    """XLA of jaxlib 0.7 would end the process."""
    monkeypatch.setattr(jax, "__version_info__", (0, 7, 2))
    count = "--xla_force_host_platform_device_count=3"
    assert lib._xla_flags("--a=1", 3) == f"--a=1 {count}"


def test_a_distribution_is_asked_once_for_batches_of_a_shape(mesh):
    class Counting(dist.DataParallel):
        asked = 0

        def get_data_layout(self, data_shape):
            self.asked += 1
            return super().get_data_layout(data_shape)

    current = Counting(devices=dist.list_devices()[:2])
    for size in (4, 4, 5, 4, 5):
        placed = batches.place(np.ones((size, 3), "float32"), current)
        whole = placed.sharding.is_fully_replicated
        assert whole == (size == 5)
    assert current.asked == 2
