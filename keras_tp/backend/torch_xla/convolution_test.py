"""Convolutions on a mesh of two axes, with their gradients."""

import keras
import numpy as np
import pytest

if keras.config.backend() != "torch":
    pytest.skip("tests for torch_xla", allow_module_level=True)
pytest.importorskip("torch_xla")

import torch
from torch.nn import functional

from keras_tp import distribution

COUNT = distribution.get_device_count()
OPTIONS = {
    "depthwise": dict(groups=8),
    "padded": dict(groups=4, padding=1),
    "same": dict(groups=4, padding="same", dilation=2),
    "strided": dict(groups=2, stride=2, padding="valid"),
    "one group": dict(padding=1),
}


@pytest.mark.skipif(COUNT < 4, reason="needs a mesh of two axes")
@pytest.mark.parametrize("axes", [("batch",), ("batch", "model")], ids=str)
@pytest.mark.parametrize("rank", [1, 2, 3])
@pytest.mark.parametrize("name", OPTIONS)
def test_gradients(name, rank, axes):
    options = OPTIONS[name]
    rng = np.random.default_rng(0)
    shapes = [
        (2 * COUNT, 8, *[6] * rank),
        (16, 8 // options.get("groups", 1), *[3] * rank),
        (16,),
    ]
    x, kernel, bias = (
        torch.from_numpy(rng.standard_normal(shape, "float32"))
        for shape in shapes
    )

    def run(*given):
        given = [value.requires_grad_() for value in given]
        conv = getattr(functional, f"conv{rank}d")
        y = conv(*given, **options)
        weights = torch.cos(torch.arange(y.numel(), dtype=y.dtype))
        loss = (y * weights.reshape(y.shape).to(y.device)).sum()
        gradients = torch.autograd.grad(loss, given)
        return [value.detach().cpu().numpy() for value in (y, *gradients)]

    expected = run(*(value.clone() for value in (x, kernel, bias)))
    mesh = distribution.DeviceMesh((2, COUNT // 2), ["batch", "model"])

    def placed(value, *axes):
        axes += (None,) * (value.ndim - len(axes))
        layout = distribution.TensorLayout(axes, mesh)
        return distribution.distribute_tensor(value, layout)

    layout_map = distribution.LayoutMap(mesh)
    with distribution.ModelParallel(layout_map=layout_map).scope():
        found = run(placed(x, *axes), placed(kernel, "model"), placed(bias))
    for a, b in zip(found, expected):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


RNG = np.random.default_rng(0)
LAYERS = {
    "conv": lambda: keras.layers.Conv2D(8, 3, padding="same"),
    "in_groups": lambda: keras.layers.Conv2D(8, 3, padding="same", groups=4),
    "strided": lambda: keras.layers.Conv2D(8, 3, strides=2),
    "depthwise": lambda: keras.layers.DepthwiseConv2D(3, padding="same"),
    "separable": lambda: keras.layers.SeparableConv2D(8, 3, padding="same"),
    "transposed": lambda: keras.layers.Conv2DTranspose(8, 3, 2, "same"),
}


@pytest.mark.skipif(COUNT < 4, reason="needs a mesh of two axes")
@pytest.mark.parametrize(
    ("name", "axis", "split"),
    [
        *((name, axis, -1) for name in LAYERS for axis in ("batch", "model")),
        *(("conv", "model", split) for split in (None, -2)),
        *((name, "batch", -2) for name in ("depthwise", "transposed")),
    ],
)
def test_images_that_are_split_along_the_height(name, axis, split):
    """A dense layer's units become the rows of an image."""
    x = RNG.standard_normal((4, 6), "float32")

    def run():
        keras.utils.set_random_seed(1)
        inputs = keras.Input((6,))
        y = keras.layers.Dense(8 * 8 * 8, name="up")(inputs)
        y = keras.layers.Reshape((8, 8, 8), name="image")(y)
        layer = LAYERS[name]()
        layer.name = "images"
        model = keras.Model(inputs, layer(y))
        model.compile(keras.optimizers.SGD(0.1), "mse")
        y = np.ones(model.compute_output_shape((4, 6)), "float32")
        losses = [model.train_on_batch(x, y) for _ in range(2)]
        return [*losses, model.predict_on_batch(x), *model.get_weights()]

    expected = run()
    mesh = distribution.DeviceMesh((2, COUNT // 2), ["batch", "model"])
    layout_map = distribution.LayoutMap(mesh)
    layout_map["up/kernel"] = (None, axis)
    layout_map["image/output"] = (None, axis, None, None)
    if split is not None:
        axes = [None] * 4
        axes[split] = "model"
        layout_map["images/.*kernel"] = axes
    parallel = distribution.ModelParallel(
        layout_map=layout_map, batch_dim_name="batch"
    )
    try:
        with parallel.scope():
            found = run()
    except ValueError as e:
        # A dim of one channel, say, which the devices do not divide.
        assert "does not divide" in str(e)
        return
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
