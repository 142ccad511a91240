"""Convolutions in groups on a mesh of two axes, with their gradients."""

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
