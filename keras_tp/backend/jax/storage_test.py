import keras
import numpy as np
import pytest

from keras_tp import distribution

if keras.config.backend() != "jax":
    pytest.skip("for JAX", allow_module_level=True)

import jax

from keras_tp.backend.jax import storage


@pytest.fixture
def variable():
    devices = distribution.list_devices()
    if len(devices) < 4:
        pytest.skip("needs 4 devices")
    mesh = distribution.DeviceMesh((4,), ["model"], devices[:4])
    layout_map = distribution.LayoutMap(mesh)
    layout_map["w"] = ("model", None)
    layout_map["w"].uneven = True
    with distribution.ModelParallel(layout_map=layout_map).scope():
        yield keras.Variable(np.arange(20.0).reshape(10, 2), name="w")


def test_a_value_is_cut_where_it_is_read(variable):
    assert variable.shape == variable.value.shape == (10, 2)
    assert variable._value.shape == (12, 2)
    np.testing.assert_array_equal(variable._value[10:], 0)
    with storage.stored():
        assert variable.value is variable._value
    np.testing.assert_array_equal(
        variable.numpy(), np.arange(20.0).reshape(10, 2)
    )


def test_what_is_assigned_is_padded(variable):
    variable.assign(np.ones((10, 2)))
    assert variable._value.shape == (12, 2)
    assert float(variable._value.sum()) == 20
    variable.assign_add(np.ones((10, 2)))
    assert float(variable._value.sum()) == 40
    variable.assign(variable._value * 2)
    assert float(variable.value.sum()) == 80
    with pytest.raises(ValueError, match="must match"):
        variable.assign(np.ones((11, 2)))


def test_stateless_scopes_take_both_shapes(variable):
    for value in (np.ones((10, 2)), np.ones((12, 2))):
        with keras.StatelessScope([(variable, value)]) as scope:
            assert variable.value.shape == (10, 2)
            variable.assign(variable * 2)
        assert scope.get_current_value(variable).shape == (12, 2)
    with pytest.raises(ValueError, match="shape that matches"):
        keras.StatelessScope([(variable, np.ones((11, 2)))])
    with pytest.raises(ValueError, match="must be Variable"):
        keras.StatelessScope([(None, np.ones((12, 2)))])


def test_the_gradient_of_a_stored_array_ends_in_zeros(variable):
    def loss(value):
        with keras.StatelessScope([(variable, value)]):
            return keras.ops.sum(keras.ops.square(variable.value))

    gradient = jax.grad(loss)(variable._value)
    assert gradient.shape == (12, 2)
    np.testing.assert_array_equal(gradient[10:], 0)
    np.testing.assert_array_equal(gradient[:10], 2 * variable.numpy())


def test_a_result_of_a_step_is_kept_as_it_is(variable):
    value = variable._value * 2
    assert value.sharding == variable._value.sharding
    variable.assign(value)
    assert variable._value is value


def test_other_values_are_converted(variable):
    sharding = variable._value.sharding
    integers = jax.device_put(np.ones((12, 2), "int32"), sharding)
    elsewhere = jax.device_put(np.ones((12, 2), "float32"))
    for value in (integers, elsewhere):
        variable.assign(value)
        assert variable._value.dtype == "float32"
        assert variable._value.sharding == sharding


def test_an_initializer_may_return_a_number(variable):
    """As that of the scale in CLIP's head, which is read in a symbolic call."""
    with keras.StatelessScope():
        scale = keras.Variable(lambda *args, **kwargs: 2.5, shape=())
        assert scale.value.dtype == "float32" and float(scale.value) == 2.5
    assert float(scale.value) == 2.5
