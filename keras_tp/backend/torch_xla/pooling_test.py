"""Max pooling where a pooled dim is split, with its gradient."""

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
# Size, stride and padding of the windows.
WINDOWS = [
    (2, 1, 0),
    (3, 1, 1),
    ((3, 2, 3), (1, 1, 2), (1, 0, 1)),
    (3, 2, 1),
    (2, None, 0),
]


def numbers(rank):
    """Equal ones, too: the first of a window gets the gradient."""
    shape = 2, COUNT, *(2 * COUNT + 2 * dim for dim in range(rank))
    numbers = np.random.default_rng(0).integers(0, 6, shape)
    return numbers.astype("float32")


@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize("rank", [1, 2, 3])
@pytest.mark.parametrize("windows", WINDOWS, ids=str)
def test_gradient(windows, rank, dim):
    pool = getattr(functional, f"max_pool{rank}d")
    windows = [x[:rank] if isinstance(x, tuple) else x for x in windows]

    def run(x):
        y = getattr(functional, pool.__name__)(x, *windows)
        weights = torch.arange(y.numel(), dtype=y.dtype).reshape(y.shape)
        loss = (y * weights.to(y.device)).sum()
        (gradient,) = torch.autograd.grad(loss, x)
        return y.detach().cpu().numpy(), gradient.cpu().numpy()

    x = torch.from_numpy(numbers(rank))
    expected = run(x.clone().requires_grad_())
    mesh = distribution.DeviceMesh((COUNT,), ["model"])
    axes = [None] * x.ndim
    # The batch of two is split by two devices only.
    axes[1 if dim == 0 and COUNT != 2 else dim] = "model"
    layout = distribution.TensorLayout(axes, mesh)
    layout_map = distribution.LayoutMap(mesh)
    with distribution.ModelParallel(layout_map=layout_map).scope():
        split = distribution.distribute_tensor(x, layout)
        found = run(split.requires_grad_())
    for a, b in zip(found, expected):
        np.testing.assert_allclose(a, b, rtol=1e-6)


def test_what_is_not_a_number_stays():
    x = torch.tensor([[[1.0, float("nan"), 2.0, 3.0]]])
    mesh = distribution.DeviceMesh((COUNT,), ["model"])
    layout_map = distribution.LayoutMap(mesh)
    expected = functional.max_pool1d(x, 2, 1)
    with distribution.ModelParallel(layout_map=layout_map).scope():
        found = functional.max_pool1d(x.to("xla"), 2, 1).cpu()
    np.testing.assert_array_equal(found, expected)
