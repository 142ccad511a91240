"""Gradients of max pooling where height or width is split."""

import jax
import keras
import numpy as np
import pytest

from keras_tp import distribution as dist

IMAGES = np.random.default_rng(0).normal(size=(2, 8, 6, 4)).astype("float32")
POOLS = {
    "overlapping": lambda x: keras.ops.max_pool(x, 3, 1, "same"),
    "by keyword": lambda x: keras.ops.max_pool(
        x, pool_size=2, strides=1, data_format="channels_last"
    ),
    "channels first": lambda x: keras.ops.max_pool(
        x, 3, 1, "same", "channels_first"
    ),
    "adaptive": lambda x: keras.ops.adaptive_max_pool(x, (4, 3)),
}


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("dim", [None, 0, 1, 2, 3])
@pytest.mark.parametrize("name", POOLS)
def test_gradient(name, dim, compiled):
    def loss(x):
        y = POOLS[name](x)
        weights = np.arange(y.size, dtype="float32").reshape(y.shape)
        return keras.ops.sum(y * weights)

    gradient = jax.grad(loss)
    expected = gradient(IMAGES)
    mesh = dist.DeviceMesh((1, 2), ["batch", "model"], dist.list_devices()[:2])
    layout_map = dist.LayoutMap(mesh)
    with dist.ModelParallel(layout_map=layout_map).scope():
        axes = ["model" if d == dim else None for d in range(4)]
        layout = dist.TensorLayout(axes, mesh)
        x = dist.distribute_tensor(IMAGES, layout)
        found = (jax.jit(gradient) if compiled else gradient)(x)
    np.testing.assert_allclose(found, expected, rtol=1e-5)


@pytest.mark.parametrize("dim", [0, 3])
def test_batch_and_channels_stay_split(dim):
    mesh = dist.DeviceMesh((1, 2), ["batch", "model"], dist.list_devices()[:2])
    layout_map = dist.LayoutMap(mesh)
    with dist.ModelParallel(layout_map=layout_map).scope():
        axes = ["model" if d == dim else None for d in range(4)]
        x = dist.distribute_tensor(IMAGES, dist.TensorLayout(axes, mesh))
        y = jax.jit(POOLS["overlapping"])(x)
    assert y.sharding.shard_shape(y.shape)[dim] == y.shape[dim] // 2
