import jax
import keras
import numpy as np
import pytest

from integration_tests import harness
from keras_tp import distribution
from keras_tp.backend.jax import shared_inputs


@pytest.fixture
def kernels():
    layout_map = distribution.LayoutMap(harness.mesh((1, 2)))
    layout_map["split"] = (None, "model")
    with distribution.ModelParallel(layout_map=layout_map).scope():
        return [
            keras.Variable(np.ones((4, 6), "float32"), name=name)
            for name in ("split", "whole")
        ]


def test_split_kernels_read_one_copy(kernels):
    split, whole = kernels
    found = []

    def step(x, index):
        with keras.StatelessScope():
            found[:] = [
                shared_inputs.copied(x, split),
                shared_inputs.copied(x, split),
            ]
            assert shared_inputs.copied(x, whole) is x
            assert shared_inputs.copied(index, split) is index
        return found[0]

    x = np.array([[1.5, -np.inf, 0.0, 3e38]], "float32")
    result = jax.jit(step)(x, np.arange(4))
    assert found[0] is found[1]
    np.testing.assert_array_equal(result, x)


def test_outside_of_a_traced_step_nothing_is_copied(kernels):
    x = jax.numpy.ones((2, 4))
    assert shared_inputs.copied(x, kernels[0]) is x
    traced = []
    jax.jit(lambda x: traced.append(shared_inputs.copied(x, kernels[0]) is x))(
        x
    )
    assert traced == [True]


def test_a_function_that_is_traced_alone_has_a_copy_of_its_own(kernels):
    copies = []

    def step(x):
        with keras.StatelessScope():
            copies.append(shared_inputs.copied(x, kernels[0]))
            return jax.checkpoint(inner)(x)

    def inner(x):
        copies.append(shared_inputs.copied(x, kernels[0]))
        return copies[-1]

    jax.jit(step)(jax.numpy.ones((2, 4)))
    assert copies[0] is not copies[1]
