"""Losses, poolings and truth values of torch on split tensors."""

import keras
import pytest

if keras.config.backend() != "torch":
    pytest.skip("tensors of torch", allow_module_level=True)

import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Shard

from integration_tests import torch_ops_test
from integration_tests.torch_ops_test import M
from integration_tests.torch_ops_test import check
from integration_tests.torch_ops_test import randn
from integration_tests.torch_ops_test import whole
from keras_tp import distribution
from keras_tp.backend.torch import placement
from keras_tp.backend.torch.collective_counter import CollectiveCounter

mesh = torch_ops_test.mesh


def placed(value, axes, mesh):
    layout = distribution.TensorLayout(axes, mesh)
    return distribution.distribute_tensor(value.clone(), layout)


LOSSES = (
    F.binary_cross_entropy_with_logits,
    F.huber_loss,
    F.mse_loss,
    F.smooth_l1_loss,
    F.soft_margin_loss,
)


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("shape", [(4, 8), (5, 7)])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.__name__)
def test_losses_are_those_of_all_samples(loss, reduction, shape, dim, mesh):
    """And with shards of several sizes."""

    def run(x, y):
        if isinstance(x, DTensor):
            *others, _ = x.placements
            placements = [*others, Shard(dim)]
            x, y = (t.redistribute(placements=placements) for t in (x, y))
        y = torch.sigmoid(y.detach())
        y = torch.sign(y - 0.5) if loss is F.soft_margin_loss else y
        return loss(x, y, reduction=reduction)

    x, y = randn(*shape), randn(*shape[::-1]).T
    counter = CollectiveCounter()
    with counter:
        check(run, [x, y], [whole(2)] * 2, mesh)
    if reduction != "none":
        # The loss itself. The gradient of `x` is gathered, as `x` is whole.
        assert counter.total["all_reduce"] == [2, 2 * 4]
        assert counter.total["all_gather"][0] == 2


@pytest.mark.parametrize(
    "loss", [*LOSSES, F.binary_cross_entropy], ids=lambda loss: loss.__name__
)
def test_the_gradient_of_a_mean_gathers_nothing(loss, mesh):
    """It is whole, and the outputs are split."""
    value, target = torch.sigmoid(randn(4, 8)), torch.ones(4, 8)
    want = value.clone().requires_grad_()
    loss(want, target, reduction="none").mean(-1).sum().backward()
    got = placed(value, (None, M), mesh).requires_grad_()
    counter = CollectiveCounter()
    with counter:
        loss(got, target, reduction="none").mean(-1).sum().backward()
    assert counter.total["all_gather"] == [0, 0]
    torch.testing.assert_close(placement.to_full(got.grad), want.grad)


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.__name__)
def test_a_loss_of_plain_tensors_beside_a_split_one(loss, mesh):
    x, y = randn(4, 8), randn(8, 4).T
    target = torch.sign(y) if loss is F.soft_margin_loss else torch.sigmoid(y)
    grads = []
    for given in (y, placed(y, (None, M), mesh)):
        leaf = x.clone().requires_grad_()
        (loss(leaf, target) + (given**2).sum()).backward()
        grads.append(placement.to_full(leaf.grad))
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize("size", [1, 400])
def test_the_mean_of_a_loss_in_float16(size, mesh):
    """Of which the sum is too large; and with an empty shard."""
    x = torch.full((size, 400), 4.0, dtype=torch.float16)
    x = placement.replicate(x, placed(x, whole(2), mesh).device_mesh)
    *others, _ = x.placements
    x = x.redistribute(placements=[*others, Shard(0)])
    assert F.mse_loss(x, torch.zeros_like(x)).full_tensor() == 16


@pytest.mark.parametrize("tensors", [False, True], ids=["lists", "tensors"])
@pytest.mark.parametrize("dim", [0, 1])
def test_ctc_loss(dim, tensors, mesh):
    classes = torch.arange(12).reshape(4, 3) % 4 + 1
    of_samples, of_classes = (8,) * 4, (3,) * 4
    if tensors:
        of_samples = torch.tensor(of_samples)
        of_classes = torch.tensor(of_classes)
    axes = [None, None, None]
    axes[dim] = M
    check(
        lambda x: F.ctc_loss(
            x.log_softmax(-1), classes, of_samples, of_classes
        ),
        [randn(8, 4, 5)],
        [tuple(axes)],
        mesh,
    )


POOLS = {
    "adaptive_avg_pool3d": lambda x: F.adaptive_avg_pool3d(x, 3),
    "adaptive_max_pool3d": lambda x: F.adaptive_max_pool3d(x, 3),
    "avg_pool3d": lambda x: F.avg_pool3d(x, 3, stride=1, padding=1),
    "max_pool3d": lambda x: F.max_pool3d(x, 3, stride=1, padding=1),
}


@pytest.mark.parametrize("dim", [0, 1, 2, 4])
@pytest.mark.parametrize("name", POOLS)
def test_pools_of_volumes(name, dim, mesh):
    axes = [None] * 5
    axes[dim] = M
    counter = CollectiveCounter()
    with counter:
        check(POOLS[name], [randn(4, 4, 4, 4, 4)], [tuple(axes)], mesh)
    if dim < 2:
        # `check` compares twice, and gathers a value and a gradient each time.
        assert counter.total["all_gather"][0] == 4


TRUTHS = {
    "as a number": lambda found: found * 1.0,
    "as an integer": lambda found: found.int(),
    "not": lambda found: (~found).int(),
    "all": lambda found: (found == True).int(),  # noqa: E712
}


@pytest.mark.parametrize("of_all", [torch.any, torch.all])
@pytest.mark.parametrize("limit", [-99.0, 0.0, 99.0])
@pytest.mark.parametrize("axes", [(M, None), (None, M)])
@pytest.mark.parametrize("use", TRUTHS)
def test_truth_of_split_values(use, axes, limit, of_all, mesh):
    """DTensor adds up the truths of the devices, to 2 of 2."""
    check(
        lambda x: TRUTHS[use](of_all(x.detach() > limit)),
        [randn(4, 8)],
        [axes],
        mesh,
    )
