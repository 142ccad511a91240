import gc

import keras
import numpy as np
import pytest
from keras import ops

from keras_tp import distribution

if keras.config.backend() != "jax":
    pytest.skip("for JAX", allow_module_level=True)

import jax

from keras_tp.backend.jax import storage

RNG = np.random.default_rng(0)
KERNEL = RNG.normal(size=(5, 24)).astype("float32")
BIAS = RNG.normal(size=24).astype("float32")
X = RNG.normal(size=(2, 3, 5)).astype("float32")


@pytest.fixture
def variables():
    devices = distribution.list_devices()
    if len(devices) < 4:
        pytest.skip("needs 4 devices")
    mesh = distribution.DeviceMesh((4,), ["model"], devices[:4])
    layout_map = distribution.LayoutMap(mesh)
    for name, axes in (("kernel", (None, "model")), ("bias", ("model",))):
        layout_map[name] = axes
        layout_map[name].blocks = {len(axes) - 1: 3}
    with distribution.ModelParallel(layout_map=layout_map).scope():
        yield (
            keras.Variable(KERNEL, name="kernel"),
            keras.Variable(BIAS, name="bias"),
        )


def test_each_device_holds_a_part_of_each_block(variables):
    kernel, bias = variables
    assert kernel.shape == kernel.value.shape == (5, 24)
    assert kernel._value.shape == (5, 3, 8) and bias._value.shape == (3, 8)
    for shard in kernel._value.addressable_shards:
        assert shard.data.shape == (5, 3, 2)
        index = (slice(None), *shard.index[1:])
        want = KERNEL.reshape(5, 3, 8)[index]
        np.testing.assert_array_equal(shard.data, want)
    np.testing.assert_array_equal(kernel.numpy(), KERNEL)
    np.testing.assert_array_equal(bias.numpy(), BIAS)


def test_a_split_takes_the_blocks_of_a_product(variables):
    kernel, bias = variables
    values = [kernel._value, bias._value]

    def compiled(sections):
        def parts(values, x):
            with keras.StatelessScope(list(zip(variables, values))):
                y = ops.add(ops.matmul(x, kernel), bias)
                return ops.split(y, sections, -1)

        return jax.jit(parts).lower(values, X).compile()

    want = np.split(X @ KERNEL + BIAS, 3, -1)
    for sections in (3, [8, 16]):
        program = compiled(sections)
        assert "all-gather" not in program.as_text()
        found = program(values, X)
        for part, expected in zip(found, want):
            np.testing.assert_allclose(part, expected, rtol=1e-5, atol=1e-6)
            # Split along the last dim, without communication.
            assert part.addressable_shards[0].data.shape == (2, 3, 2)
    # Other sections are no blocks.
    uneven = compiled([3, 11])(values, X)
    assert [part.shape[-1] for part in uneven] == [3, 8, 13]
    np.testing.assert_allclose(
        np.concatenate(uneven, -1), np.concatenate(want, -1), rtol=1e-5
    )


def test_other_axes_and_ranks(variables):
    kernel, _ = variables
    for x in (X, X[0], X[0, 0]):
        y = ops.matmul(x, kernel)
        np.testing.assert_allclose(y, x @ KERNEL, rtol=1e-5, atol=1e-6)
    halves = ops.split(ops.matmul(X[:, :2], kernel), 2, axis=1)
    np.testing.assert_allclose(halves[1], X[:, 1:2] @ KERNEL, rtol=1e-5)


def test_forms_are_forgotten_with_their_tensors(variables):
    kernel, _ = variables
    y = ops.matmul(X, kernel)
    assert storage.noted(y)[1] == 2 and storage.noted(y + 0) == (None, None)
    reference = storage._noted[id(y)][0]
    del y
    # The results of the last program with collectives are kept.
    ops.matmul(X[:1], kernel)
    gc.collect()
    assert reference() is None
    assert reference not in [entry[0] for entry in storage._noted.values()]
