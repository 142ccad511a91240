"""Operations of torch on split tensors, and their gradients, as on one."""

import re

import keras
import numpy as np
import pytest

if keras.config.backend() != "torch":
    pytest.skip("operations of torch", allow_module_level=True)

import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Replicate

from keras_tp import distribution
from keras_tp.backend.torch import placement
from keras_tp.backend.torch.collective_counter import CollectiveCounter
from keras_tp.backend.torch.ops import table

M = "model"


def generator(seed):
    return torch.Generator().manual_seed(seed)


def randn(*shape):
    return torch.randn(*shape, generator=generator(sum(shape)))


def whole(rank):
    return (None,) * rank


@pytest.fixture
def mesh():
    devices = distribution.list_devices()
    if len(devices) < 2:
        pytest.skip("needs several processes")
    mesh = distribution.DeviceMesh((1, len(devices)), ["batch", M])
    distribution.set_distribution(
        distribution.ModelParallel(layout_map=distribution.LayoutMap(mesh))
    )
    yield mesh
    distribution.set_distribution(None)
    distribution.distribution_lib.uninstall()


def check(function, tensors, axes, mesh):
    """Compares values and gradients; returns result and gradients.

    The gradient is replicated, and then split like the result.
    """
    _check(function, tensors, axes, mesh, True)
    return _check(function, tensors, axes, mesh, False)


def _check(function, tensors, axes, mesh, is_split):
    plain = [t.clone() for t in tensors]
    split = [
        distribution.distribute_tensor(
            t.clone(), distribution.TensorLayout(a, mesh)
        ).detach()
        for t, a in zip(tensors, axes)
    ]
    for tensor in (*plain, *split):
        tensor.requires_grad_(tensor.is_floating_point())
    torch.manual_seed(7)
    expected = function(*plain)
    torch.manual_seed(7)
    actual = function(*split)
    np.testing.assert_allclose(
        placement.to_full(actual).detach(), expected.detach(), atol=2e-5
    )
    if not expected.requires_grad:
        return actual, []
    gradient = torch.randn(expected.shape, generator=generator(3))
    expected.backward(gradient)
    gradient = placement.replicate(gradient, split[0].device_mesh)
    placements = getattr(actual, "placements", [])
    if is_split and placements and not any(p.is_partial() for p in placements):
        gradient = gradient.redistribute(placements=placements)
    actual.backward(gradient)
    for a, b in zip(split, plain):
        if b.grad is not None:
            np.testing.assert_allclose(
                placement.to_full(a.grad), b.grad, atol=1e-4
            )
    return actual, [t.grad for t in split]


def test_a_gradient_that_cannot_stay_split_in_a_reshape(mesh):
    """Heads of a product of two dims: the gradient of the flat dim is split."""
    heads = 3 * len(distribution.list_devices())

    def attend(x, w):
        parts = keras.ops.reshape(x, (4, 3, heads // 3, 5))
        flat = keras.ops.reshape(parts * 2, (4, heads, 5))
        return torch.einsum("bhd,hde->be", flat, w)

    check(
        attend,
        [randn(4, heads, 5), randn(heads, 5, 6)],
        [(None, M, None), (M, None, None)],
        mesh,
    )


X = (4, 8, 7, 6)
CONVOLUTIONS = {
    "conv": (lambda x, w: F.conv2d(x, w, padding=1), (16, 8, 3, 3)),
    "groups": (lambda x, w: F.conv2d(x, w, groups=4), (12, 2, 3, 3)),
    "depthwise": (lambda x, w: F.conv2d(x, w, groups=8), (16, 1, 3, 3)),
    "transposed": (
        lambda x, w: F.conv_transpose2d(x, w, stride=2, output_padding=1),
        (8, 12, 3, 3),
    ),
    "transposed_groups": (
        lambda x, w: F.conv_transpose2d(x, w, groups=4),
        (8, 2, 3, 3),
    ),
}


@pytest.mark.parametrize("of_x", [None, 0, 1])
@pytest.mark.parametrize("of_weight", [None, 0, 1])
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolutions(name, of_weight, of_x, mesh):
    function, shape = CONVOLUTIONS[name]
    size = dict(zip(mesh.axis_names, mesh.shape))[M]
    if of_weight is not None and shape[of_weight] % size:
        pytest.skip("does not divide")
    axes = [
        tuple(M if dim == of else None for dim in range(4))
        for of in (of_x, of_weight)
    ]
    check(function, [randn(*X), randn(*shape)], axes, mesh)


@pytest.mark.parametrize("of_weight", [0, 1])
def test_a_bias_is_added_once(of_weight, mesh):
    axes = tuple(M if dim == of_weight else None for dim in range(4))
    check(
        lambda x, w, b: F.conv2d(x, w, b, stride=2),
        [randn(*X), randn(8, 8, 3, 3), randn(8)],
        [whole(4), axes, whole(1)],
        mesh,
    )


@pytest.mark.parametrize("rank", [1, 3])
@pytest.mark.parametrize("of_weight", [0, 1])
def test_convolutions_of_other_ranks(of_weight, rank, mesh):
    function = {1: F.conv1d, 3: F.conv3d}[rank]
    axes = tuple(M if dim == of_weight else None for dim in range(rank + 2))
    check(
        function,
        [randn(2, 4, *[5] * rank), randn(8, 4, *[3] * rank)],
        [whole(rank + 2), axes],
        mesh,
    )


@pytest.mark.parametrize("masked", [None, (8, 8), (4, 1, 8, 8), (4, 4, 8, 8)])
@pytest.mark.parametrize("dim", [None, 0, 1, 2, 3])
def test_attention(dim, masked, mesh):
    axes = tuple(M if d == dim else None for d in range(4))
    mask = None if masked is None else randn(*masked)
    check(
        lambda q, k, v: F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None
        ),
        [randn(4, 4, 8, 8), randn(4, 4, 8, 8) + 1, randn(4, 4, 8, 8) - 1],
        [axes] * 3,
        mesh,
    )


@pytest.mark.parametrize("axes", [(M, None), (None, M)])
def test_embedding(axes, mesh):
    # The first and last row of every shard.
    ids = torch.arange(24).reshape(4, 6)
    _, (gradient,) = check(
        lambda table: F.embedding(ids, table), [randn(24, 8)], [axes], mesh
    )
    # The gradient is split as the table is: never whole.
    size = dict(zip(mesh.axis_names, mesh.shape))[M]
    assert gradient.to_local().numel() * size == 24 * 8


@pytest.mark.parametrize(
    "draw",
    [
        lambda x: F.dropout(x, 0.4),
        lambda x: torch.rand_like(x) + 0 * x,
        lambda x: torch.randn_like(x) + 0 * x,
        lambda x: torch.empty_like(x).normal_() + 0 * x,
        lambda x: torch.empty_like(x).uniform_(1, 2) + 0 * x,
        lambda x: torch.bernoulli(torch.sigmoid(x)).to(x.dtype) + 0 * x,
        lambda x: torch.bernoulli(x.detach(), 0.4),
        lambda x: torch.empty_like(x).bernoulli_(x.detach().sigmoid()) + 0 * x,
        lambda x: torch.empty_like(x).exponential_() + 0 * x,
        lambda x: torch.empty_like(x).cauchy_() + 0 * x,
        lambda x: torch.empty_like(x).geometric_(0.4) + 0 * x,
        lambda x: torch.empty_like(x).log_normal_() + 0 * x,
        lambda x: torch.empty_like(x).random_() + 0 * x,
        lambda x: torch.empty_like(x).random_(9) + 0 * x,
        lambda x: torch.empty_like(x).random_(3, 9) + 0 * x,
        lambda x: torch.randint_like(x, 9) + 0 * x,
        lambda x: torch.randint_like(x, 3, 9) + 0 * x,
        lambda x: torch.native_dropout(x, 0.4, True)[0],
        lambda x: torch.multinomial(torch.softmax(x, -1), 2),
        lambda x: torch.binomial(x.detach().exp().ceil(), x.detach().sigmoid()),
        lambda x: torch.poisson(x.detach().exp()),
        lambda x: torch.normal(x.detach(), 2.0),
        lambda x: torch.normal(2.0, x.detach().exp()),
        lambda x: torch.normal(x.detach(), x.detach().exp()),
        lambda x: torch._standard_gamma(x.exp()),
        lambda x: torch._sample_dirichlet(x.detach().exp()),
    ],
)
@pytest.mark.parametrize("axes", [(M, None), (None, M)])
def test_random_numbers_are_those_of_one_process(axes, draw, mesh):
    check(draw, [randn(8, 4)], [axes], mesh)


LAST = {
    "unfold": lambda x: x.unfold(1, 3, 1),
    "cumsum": lambda x: x.cumsum(-1),
    "cumprod": lambda x: x.cumprod(-1),
    "logcumsumexp": lambda x: x.logcumsumexp(-1),
    "cummax": lambda x: x.cummax(-1).values,
    "cummin": lambda x: x.cummin(-1).values,
    "unbind": lambda x: x.unbind(1)[2],
    "nonzero": lambda x: torch.nonzero(x > 0),
    "masked_select": lambda x: x.masked_select(x > 0),
    "boolean_index": lambda x: x[x > 0],
    "unique": lambda x: torch.unique(x.detach().round()),
    "bincount": lambda x: torch.bincount((x > 0).long().reshape(-1)),
    "searchsorted": lambda x: torch.searchsorted(x.detach().sort().values, x),
    "bucketize": lambda x: torch.bucketize(x, torch.tensor([-1.0, 0.0, 1.0])),
    "any": lambda x: (x > 2).any().int(),
    "any_dim": lambda x: (x > 0).any(-1).int(),
    "any_dims": lambda x: (x > 0).any((0, 1)).int(),
    "all": lambda x: (x > -1).all().int(),
    "all_dim": lambda x: (x > -1).all(-1).int(),
    "all_dims": lambda x: (x > -1).all((0, 1)).int(),
    "soft_margin_loss": lambda x: F.soft_margin_loss(x, torch.ones(4, 8)),
    "mse_loss": lambda x: F.mse_loss(x, torch.zeros(4, 8)),
    "huber_loss": lambda x: F.huber_loss(x, torch.zeros(4, 8)),
    "smooth_l1_loss": lambda x: F.smooth_l1_loss(x, torch.zeros(4, 8)),
    "bce": lambda x: F.binary_cross_entropy(x.sigmoid(), torch.ones(4, 8)),
    "bce_each": lambda x: F.binary_cross_entropy(
        x.sigmoid(), torch.ones(4, 8), reduction="none"
    ),
    "bce_logits": lambda x: F.binary_cross_entropy_with_logits(
        x, torch.ones(4, 8)
    ),
    "cross_entropy": lambda x: F.cross_entropy(
        x, torch.tensor([1, 2, 3, 0]), reduction="none"
    ),
    "argmax": lambda x: x.argmax(-1),
    "sort": lambda x: x.sort(-1).values,
    "topk": lambda x: x.topk(3).values,
    "flip": lambda x: x.flip(-1),
    "roll": lambda x: x.roll(1, -1),
    "pad": lambda x: F.pad(x, (1, 2)),
    "gather": lambda x: x.gather(1, torch.tensor([[0, 7, 3]] * 4)),
    "index_select": lambda x: x.index_select(1, torch.tensor([0, 5, 2])),
    "slice": lambda x: x[:, 1:5],
    "softmax": lambda x: x.softmax(-1),
    "logsumexp": lambda x: x.logsumexp(-1),
    "var": lambda x: x.var(-1),
    "amax": lambda x: x.amax(-1),
    "prod": lambda x: x.prod(-1),
    "norm": torch.linalg.norm,
    "layer_norm": lambda x: F.layer_norm(x, (8,)),
    "repeat": lambda x: x.repeat_interleave(3, 1),
    "scatter_reduce": lambda x: torch.zeros(4, 8).scatter_reduce(
        1, torch.tensor([[0, 7, 3, 3, 1, 2, 0, 5]] * 4), x, "sum"
    ),
    "keras_scatter": lambda x: keras.ops.scatter(
        torch.tensor([[0], [2], [2], [1]]), x, (4, 8)
    ),
    "keras_scatter_update": lambda x: keras.ops.scatter_update(
        torch.ones(4, 8), torch.tensor([[3], [1]]), x[:2]
    ),
    "keras_slice_update": lambda x: keras.ops.slice_update(
        torch.ones(4, 8), (1, 0), x[:2]
    ),
    "vmap": lambda x: torch.vmap(lambda row: row.cumsum(0))(x),
    "tile": lambda x: x.tile(1, 3),
}


@pytest.mark.parametrize("name", LAST)
def test_operations_along_a_split_dim(name, mesh):
    check(LAST[name], [randn(4, 8)], [(None, M)], mesh)


# -100 is what torch's losses leave out.
CLASSES = torch.tensor([[5, 0, 7, -100], [2, 3, 4, 6]])
OF_CLASSES = {
    "softmax": lambda x: x.softmax(1),
    "log_softmax": lambda x: x.log_softmax(1),
    "cross_entropy": lambda x: F.cross_entropy(x, CLASSES, reduction="none"),
    "argmax": lambda x: x.argmax(1),
    "argmax_keepdim": lambda x: x.argmax(1, keepdim=True),
    "first_of_equals": lambda x: x.round().argmax(1),
}


@pytest.mark.parametrize("name", OF_CLASSES)
def test_split_classes_are_not_gathered(name, mesh):
    with CollectiveCounter() as counter:
        _check(
            OF_CLASSES[name],
            [3 * randn(2, 8, 4)],
            [(None, M, None)],
            mesh,
            is_split=False,
        )
    _, bytes_gathered = counter.total["all_gather"]
    # The test itself gathers the result and its gradient.
    if name.startswith("argmax") or name == "first_of_equals":
        # A candidate of each process, and its class: 4 and 8 bytes.
        assert bytes_gathered == 2 * 4 * mesh.shape[1] * 12
    else:
        of_logits = 2 * 8 * 4 * 4
        gathered = 1 if name == "cross_entropy" else 2
        assert bytes_gathered == gathered * of_logits
        assert counter.total["all_reduce"][0] == 3 + (name == "cross_entropy")


def test_the_loss_of_split_samples_stays_split(mesh):
    loss, (gradient,) = check(
        lambda x: F.cross_entropy(x, CLASSES[0], reduction="none"),
        [randn(4, 8)],
        [(M, None)],
        mesh,
    )
    assert loss.placements[0].is_shard(0)
    assert gradient.placements[0].is_shard(0)


def test_the_mean_of_a_loss_over_split_classes(mesh):
    check(
        lambda x: F.cross_entropy(x, CLASSES),
        [randn(2, 8, 4)],
        [(None, M, None)],
        mesh,
    )


def test_a_target_that_is_no_class_is_an_error(mesh):
    x = distribution.distribute_tensor(
        randn(2, 8), distribution.TensorLayout((None, M), mesh)
    )
    with pytest.raises(RuntimeError, match="not one of the 8 classes"):
        F.cross_entropy(x, torch.tensor([1, 8]), reduction="none")


@pytest.mark.parametrize(
    "function",
    [
        lambda x: F.max_pool2d(x, 2),
        lambda x: F.avg_pool2d(x, 2),
        lambda x: F.max_pool3d(x[:, None], (1, 2, 2)),
        lambda x: F.avg_pool3d(x[:, None], (1, 2, 2)),
        lambda x: F.adaptive_avg_pool2d(x, 3),
        lambda x: F.adaptive_max_pool2d(x, 3),
        lambda x: F.pad(x[..., 0], (1, 2), "reflect"),
        lambda x: F.pad(x, (1, 2, 2, 1), "reflect"),
        lambda x: F.pad(x[..., 0], (1, 2), "replicate"),
        lambda x: F.pad(x, (1, 2, 2, 1), "replicate"),
        lambda x: F.unfold(x, 3),
        lambda x: F.group_norm(x, 2),
        lambda x: F.interpolate(x, scale_factor=2),
    ],
)
def test_operations_on_split_channels(function, mesh):
    check(function, [randn(*X)], [(None, M, None, None)], mesh)


@pytest.mark.parametrize(
    "function",
    [
        lambda x, w, b: F.gelu(x @ w + b),
        lambda x, w, b: (x @ w) * (x @ w) + b,
        lambda x, w, b: torch.einsum("ab,bc->ac", x, w) + 1.0,
    ],
)
def test_a_split_sum(function, mesh):
    check(
        function,
        [randn(4, 8), randn(8, 6), randn(6)],
        [whole(2), (M, None), whole(1)],
        mesh,
    )


@pytest.mark.parametrize(
    "function",
    [
        lambda x: torch.tensordot(x, torch.ones(8, 3), 1),
        keras.layers.Lambda(lambda x: keras.ops.sum(x, axis=-1)),
        keras.layers.Lambda(lambda x: [x, keras.ops.sum(x, axis=-1)]),
    ],
)
def test_a_sum_is_added_up_where_it_is_made(function, mesh):
    """Or each of those that take it in would add it up anew."""
    x = distribution.distribute_tensor(
        randn(4, 8), distribution.TensorLayout((None, M), mesh)
    )
    for result in keras.tree.flatten(function(x)):
        assert not any(p.is_partial() for p in result.placements)


def test_numbers_that_depend_on_values_are_refused(mesh):
    x = distribution.distribute_tensor(
        randn(4, 8), distribution.TensorLayout((None, M), mesh)
    )
    with pytest.raises(NotImplementedError, match="differ between devices"):
        F.rrelu(x, training=True)
    with pytest.raises(NotImplementedError, match="differ between devices"):
        F.rrelu(x, training=True, inplace=True)


def test_what_layers_need_is_not_computed_whole():
    names = " ".join(table.REPLICATED.values()).split()
    for part in ("mm", "convolution", "embedding", "attention"):
        assert not [name for name in names if part in re.split("[._]", name)]


def on_each_device(x):
    if not isinstance(x, DTensor):
        return x
    return x.redistribute(placements=[Replicate()] * x.device_mesh.ndim)


KINDS = {
    "mean": lambda x: torch.mean(x, -1),
    "norm": lambda x: torch.linalg.vector_norm(x, dim=-1),
    "product": lambda x: torch.prod(x, -1),
    "smallest": lambda x: torch.amin(x, -1),
    "sum": lambda x: torch.sum(x, -1),
    "whole": lambda x: on_each_device(x).sum(-1),
}
JOINS = {
    "add": torch.add,
    "cat": lambda a, b: torch.cat([a, b]),
    "maximum": torch.maximum,
    "multiply": torch.mul,
    "stack": lambda a, b: torch.stack([a, b]),
    "where": lambda a, b: torch.where(torch.arange(4) > 1, a, b),
}


@pytest.mark.parametrize("join", JOINS)
@pytest.mark.parametrize("first", KINDS)
def test_partial_results_of_several_kinds_meet(first, join, mesh):
    """DTensor gives joined tensors one kind: a sum is taken for a norm."""
    for second in KINDS.values():

        def function(x, second=second):
            return JOINS[join](KINDS[first](x), second(x))

        check(function, [randn(4, 8)], [(None, M)], mesh)
