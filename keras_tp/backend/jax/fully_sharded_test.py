"""Values that a compiled step gathers over the axis of the batch."""

import keras
import numpy as np
import pytest

from keras_tp import distribution
from keras_tp.distribution.tensor_layout import layout_with

if keras.config.backend() != "jax":
    pytest.skip("for JAX", allow_module_level=True)

import jax
from keras.src.backend.common.stateless_scope import StatelessScope

from keras_tp.backend import hlo_collectives
from keras_tp.backend.jax import fully_sharded

X = np.random.default_rng(0).normal(size=(4, 8)).astype("float32")
KERNEL = np.random.default_rng(1).normal(size=(8, 12)).astype("float32")


def scope(names, shape):
    count = int(np.prod(shape))
    devices = distribution.list_devices()[:count]
    mesh = distribution.DeviceMesh(shape, names, devices)
    layout_map = distribution.LayoutMap(mesh)
    return mesh, distribution.ModelParallel(layout_map=layout_map)


def collectives(axes, names=("batch", "model"), shape=(2, 2), blocks=None):
    """Returns the collectives of a product, and those of its gradient."""
    mesh, parallel = scope(list(names), shape)
    with parallel.scope():
        layout = layout_with(axes, mesh, uneven=True, blocks=blocks)
        kernel = keras.Variable(KERNEL, layout=layout)

        def total(value, x):
            with StatelessScope([(kernel, value)]):
                return keras.ops.sum(keras.ops.matmul(x, kernel) ** 2)

        x = distribution.distribute_tensor(X, parallel.get_data_layout(X.shape))
        args = kernel._value, x
        found = jax.jit(jax.value_and_grad(total))(*args)
        program = jax.jit(jax.value_and_grad(total)).lower(*args).compile()
    want = jax.value_and_grad(lambda w: ((X @ w) ** 2).sum())(KERNEL)
    np.testing.assert_allclose(found[0], want[0], rtol=1e-5)
    gradient = np.asarray(found[1]).reshape(KERNEL.shape)
    np.testing.assert_allclose(gradient, want[1], rtol=1e-4)
    assert found[1].sharding.spec == kernel._value.sharding.spec
    counted = hlo_collectives.count(program.as_text())
    return {kind: pair for kind, pair in counted.items() if pair[0]}


def test_a_kernel_is_gathered_and_its_gradient_is_split():
    found = collectives(("batch", "model"))
    # The columns of one device, of all rows.
    assert found["all_gather"] == (1, KERNEL.nbytes // 2)
    # The gradient, which XLA on CPUs sums and slices, and the loss twice.
    assert found["all_reduce"] == (3, KERNEL.nbytes // 2 + 8)


def test_an_axis_of_batches_alone():
    found = collectives(("batch", None), ("batch",), (4,))
    assert found["all_gather"] == (1, KERNEL.nbytes)


def test_the_only_axis_of_another_name_splits_a_model():
    """Keras splits batches over it too, and XLA gathers what it needs."""
    mesh, parallel = scope(["model"], (4,))
    with parallel.scope():
        assert parallel.batch_dim_name == "model"
        assert fully_sharded._axis_of((None, "model")) is None


def test_blocks_of_one_kernel():
    found = collectives(("batch", "model"), blocks={1: 3})
    assert found["all_gather"][1] <= KERNEL.nbytes


def test_an_optimizer_updates_its_part():
    mesh, parallel = scope(["batch", "model"], (2, 2))
    with parallel.scope():
        layout = layout_with(("batch", "model"), mesh)
        kernel = keras.Variable(KERNEL, layout=layout)
        optimizer = keras.optimizers.Adam(0.1)
        optimizer.build([kernel])
        slots = [v._value for v in optimizer.variables]

        def update(value, slots, gradient):
            return optimizer.stateless_apply(slots, [gradient], [value])

        args = [kernel._value], slots, kernel._value
        text = (
            jax.jit(lambda v, s, g: update(v[0], s, g))
            .lower(*args)
            .compile()
            .as_text()
        )
    assert sum(pair[0] for pair in hlo_collectives.count(text).values()) == 0


def test_the_backward_pass_gathers_kernels_again():
    count, size = 12, 128
    mesh, parallel = scope(["batch"], (4,))
    with parallel.scope():
        layout = layout_with(("batch", None), mesh)
        kernels = [
            keras.Variable(np.eye(size, dtype="float32"), layout=layout)
            for _ in range(count)
        ]
        # Tied: a transpose is gathered again too.
        pairs = list(zip(kernels[::2], kernels[1::2]))

        def total(values, x):
            with StatelessScope(list(zip(kernels, values))):
                for first, second in pairs:
                    x = keras.ops.tanh(keras.ops.matmul(x, first))
                    x = keras.ops.einsum("ab,bc->ac", x, second)
                    x = keras.ops.matmul(x, keras.ops.transpose(first))
            return keras.ops.sum(x)

        x = np.ones((4, size), "float32")
        x = distribution.distribute_tensor(x, parallel.get_data_layout(x.shape))
        args = [kernel._value for kernel in kernels], x
        step = jax.jit(jax.value_and_grad(total)).lower(*args).compile()
    gathers = hlo_collectives.count(step.as_text())["all_gather"]
    whole = size * size * 4
    # Three products of each pair, in both passes, but for the gradient of `x`.
    assert gathers == (6 * len(pairs) - 1, (6 * len(pairs) - 1) * whole)
