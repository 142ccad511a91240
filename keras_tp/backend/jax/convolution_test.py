"""Convolutions and their gradients on meshes of two axes.

`integration_tests/recipes_test.py` trains a whole model (`conv_next`).
"""

import jax
import numpy as np
import pytest
from keras import ops

from keras_tp import distribution as dist

# Name: function, shape of the image, shape of the kernel.
CONVOLUTIONS = {
    "depthwise": (
        lambda x, k: ops.depthwise_conv(x, k, padding="same"),
        (4, 6, 5, 8),
        (3, 3, 8, 1),
    ),
    "channels of their own": (
        lambda x, k: ops.conv(x, k, 1, "same", dilation_rate=[2, 1]),
        (4, 6, 5, 8),
        (3, 3, 1, 16),
    ),
    "groups": (
        lambda x, k: ops.conv(x, k, [2, 1], "valid"),
        (4, 6, 5, 8),
        (3, 3, 2, 8),
    ),
    "channels first": (
        lambda x, k: ops.conv(x, k, 1, "same", "channels_first"),
        (4, 8, 5, 3),
        (2, 2, 4, 8),
    ),
    "one dim": (lambda x, k: ops.conv(x, k, 1, "same"), (4, 9, 4), (3, 2, 4)),
    "a batch that does not divide": (
        lambda x, k: ops.depthwise_conv(x, k, padding="same"),
        (3, 6, 5, 8),
        (3, 3, 8, 1),
    ),
}


def numbers(shape, seed):
    return np.random.default_rng(seed).normal(size=shape).astype("float32")


@pytest.mark.parametrize("split", [None, -1, -2])
@pytest.mark.parametrize("shape", [(2, 2), (1, 2), (2, 1)])
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_gradient(name, shape, split):
    conv, of_image, of_kernel = CONVOLUTIONS[name]
    x, k = numbers(of_image, 0), numbers(of_kernel, 1)

    def loss(x, k):
        y = conv(x, k)
        return ops.sum(y * numbers(y.shape, 2)), y

    compute = jax.grad(loss, argnums=(0, 1), has_aux=True)
    expected = jax.tree.leaves(compute(x, k))
    count = int(np.prod(shape))
    mesh = dist.DeviceMesh(
        shape, ["batch", "model"], dist.list_devices()[:count]
    )
    layout_map = dist.LayoutMap(mesh)
    with dist.ModelParallel(layout_map=layout_map).scope():
        of_batch = [None if len(x) % shape[0] else "batch"]
        axes = [None] * k.ndim
        if split is not None and k.shape[split] % shape[1] == 0:
            axes[split] = "model"
        x = dist.distribute_tensor(
            x, dist.TensorLayout(of_batch + [None] * (x.ndim - 1), mesh)
        )
        k = dist.distribute_tensor(k, dist.TensorLayout(axes, mesh))
        for run in (compute, jax.jit(compute)):
            for a, b in zip(jax.tree.leaves(run(x, k)), expected):
                scale = np.abs(b).max()
                np.testing.assert_allclose(a / scale, b / scale, atol=2e-6)


# Dims of the image, and of the kernel, that are split over each axis.
SPLITS = [
    ({1: "batch"}, {}),
    ({2: "batch"}, {3: "model"}),
    ({1: "batch", 3: "model"}, {}),
    ({3: "batch"}, {0: "model"}),
    ({3: "batch"}, {0: "batch"}),
]


@pytest.mark.parametrize("dilation", [1, 2])
@pytest.mark.parametrize("of_image, of_kernel", SPLITS)
def test_height_and_width_are_split(of_image, of_kernel, dilation):
    x, k = numbers((2, 8, 8, 4), 0), numbers((2, 3, 4, 6), 1)

    def loss(x, k):
        y = ops.conv(x, k, 1, "same", dilation_rate=dilation)
        return ops.sum(y * numbers(y.shape, 2)), y

    def compute(x, k):
        # Traced each time: a trace without a distribution knows no mesh.
        step = jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True))
        return jax.tree.leaves(step(x, k))

    expected = compute(x, k)
    mesh = dist.DeviceMesh((2, 2), ["batch", "model"], dist.list_devices()[:4])
    layout_map = dist.LayoutMap(mesh)
    with dist.ModelParallel(layout_map=layout_map).scope():
        x, k = (
            dist.distribute_tensor(
                value, dist.TensorLayout([dims.get(d) for d in range(4)], mesh)
            )
            for value, dims in ((x, of_image), (k, of_kernel))
        )
        found = compute(x, k)
    for a, b in zip(found, expected):
        scale = np.abs(b).max()
        np.testing.assert_allclose(a / scale, b / scale, atol=2e-6)


@pytest.mark.parametrize("mode", ["valid", "same", "full"])
def test_correlate(mode):
    x, y = numbers((8,), 0), numbers((4,), 1)
    expected = ops.correlate(x, y, mode)
    mesh = dist.DeviceMesh((2, 2), ["batch", "model"], dist.list_devices()[:4])
    layout_map = dist.LayoutMap(mesh)
    with dist.ModelParallel(layout_map=layout_map).scope():
        x = dist.distribute_tensor(x, dist.TensorLayout(["batch"], mesh))
        y = dist.distribute_tensor(y, dist.TensorLayout(["model"], mesh))
        found = jax.jit(lambda x, y: ops.correlate(x, y, mode))(x, y)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_a_second_derivative():
    conv, of_image, of_kernel = CONVOLUTIONS["depthwise"]
    x, k = numbers(of_image, 0), numbers(of_kernel, 1)

    def loss(k):
        return ops.sum(conv(x, k) ** 3)

    def product(k):
        return jax.jvp(jax.grad(loss), (k,), (numbers(of_kernel, 2),))[1]

    expected = product(k)
    mesh = dist.DeviceMesh((2, 2), ["batch", "model"], dist.list_devices()[:4])
    layout_map = dist.LayoutMap(mesh)
    with dist.ModelParallel(layout_map=layout_map).scope():
        found = jax.jit(product)(k)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-3)


def test_xla_is_wrong_by_itself():
    """If this fails with a newer JAX, try to do without `convolution.py`."""
    x, k = numbers((4, 6, 5, 8), 0), numbers((3, 3, 1, 8), 1)
    mesh = dist.DeviceMesh((2, 2), ["batch", "model"], dist.list_devices()[:4])
    layout = dist.TensorLayout(["batch"] + [None] * 3, mesh).backend_layout

    # No distribution is active, so the hook changes nothing.
    gradient = jax.grad(lambda k, x: ops.sum(ops.conv(x, k, padding="same")))
    expected = jax.jit(gradient)(k, x)
    found = jax.jit(gradient)(k, jax.device_put(x, layout))
    np.testing.assert_allclose(found, 2 * expected, rtol=1e-4, atol=1e-4)
