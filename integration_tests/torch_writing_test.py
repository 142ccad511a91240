"""Writes into split tensors of torch, and shapes that follow from a call."""

import keras
import numpy as np
import pytest

if keras.config.backend() != "torch":
    pytest.skip("tensors of torch", allow_module_level=True)

import torch

from integration_tests import torch_ops_test
from integration_tests.torch_ops_test import M
from integration_tests.torch_ops_test import check
from integration_tests.torch_ops_test import randn
from keras_tp import distribution
from keras_tp.backend.torch import placement
from keras_tp.backend.torch.collective_counter import CollectiveCounter

mesh = torch_ops_test.mesh


def _set(index, value):
    def write(x):
        y = x * 2
        y[index] = value(y) if callable(value) else value
        return y

    return write


WRITES = {
    "number": _set((slice(None), 1), 5.0),
    "row": _set(1, 5.0),
    "part": _set((slice(1, 3), slice(1, 5)), torch.ones(2, 4)),
    "of a split tensor": _set((slice(None), 0), lambda y: y[:, 3] * 3),
    "mask": _set(torch.arange(32).reshape(4, 8) > 9, 0.0),
    "split mask": lambda x: _set(x > 0, 0.0)(x),
    "list": _set((slice(None), [1, 2]), 9.0),
    "add": lambda x: _set((slice(None), 1), lambda y: y[:, 1] + 4)(x),
}


@pytest.mark.parametrize("axes", [(M, None), (None, M)])
@pytest.mark.parametrize("name", WRITES)
def test_what_is_written_is_not_lost(name, axes, mesh):
    """With gradients of what was there, and of what was written."""
    result, _ = check(WRITES[name], [randn(4, 8)], [axes], mesh)
    # It stays split.
    assert any(placed.is_shard() for placed in result.placements)


@pytest.mark.parametrize(
    "write",
    [
        lambda x: x.fill_(3.0),
        lambda x: x.zero_(),
        lambda x: x.copy_(torch.ones(4)),
        lambda x: x.add_(1.0),
    ],
)
def test_a_write_into_a_copy_is_refused(write, mesh):
    value = torch.arange(32.0).reshape(4, 8)

    def placed(axes):
        layout = distribution.TensorLayout(axes, mesh)
        return distribution.distribute_tensor(value.clone(), layout)

    with pytest.raises(NotImplementedError, match="a copy.*Received: view"):
        write(placed((None, M))[:, 1])
    # Of a dim that is whole, a view is one.
    x = placed((M, None))
    write(x[:, 1])
    expected = value.clone()
    write(expected[:, 1])
    np.testing.assert_array_equal(keras.ops.convert_to_numpy(x), expected)


def test_top_k_with_another_k(mesh):
    """DTensor gives the second call the shape of the first."""
    for k in (2, 3, 1):
        result, _ = check(
            lambda x, k=k: torch.topk(x, k).values,
            [randn(4, 8)],
            [(None, M)],
            mesh,
        )
        assert result.shape == (4, k)


@pytest.mark.parametrize("shape", [(4, 3, 2), (2, 2, -1), (-1, 3, 2), (24,)])
def test_a_split_dim_that_is_taken_apart(shape, mesh):
    size = dict(zip(mesh.axis_names, mesh.shape))[M]
    x = randn(4, 6) if size == 2 else randn(4, 12)
    shape = tuple(n * size // 2 if n == 2 or n == 24 else n for n in shape)
    for function in (
        lambda x: keras.ops.reshape(x, shape),
        lambda x: x.reshape(shape),
        lambda x: x.reshape(*shape),
    ):
        check(function, [x], [(None, M)], mesh)


INDEX = torch.tensor([3, 1, 0, 2])
INDICES = torch.arange(16).reshape(4, 4) % 8
ALONG_INDEX = {
    "index_add": (lambda x, y: x.index_add_(1, INDEX, y), (4, 4)),
    "index_add rows": (lambda x, y: x.index_add_(0, INDEX, y), (4, 8)),
    "index_copy": (lambda x, y: x.index_copy_(1, INDEX, y), (4, 4)),
    "index_fill": (lambda x, y: x.index_fill_(1, INDEX, 0.5), (4, 4)),
    "scatter": (lambda x, y: x.scatter_(1, INDICES, y), (4, 4)),
    "scatter_add": (lambda x, y: x.scatter_add_(1, INDICES, y), (4, 4)),
}


@pytest.mark.parametrize("axes_of_values", [(None, None), (M, None), (None, M)])
@pytest.mark.parametrize("axes", [(None, None), (M, None), (None, M)])
@pytest.mark.parametrize("name", ALONG_INDEX)
def test_writes_along_an_index(name, axes, axes_of_values, mesh):
    write, shape = ALONG_INDEX[name]
    target, values = randn(4, 8), randn(*shape)
    expected = write(target.clone(), values)
    target, values = (
        distribution.distribute_tensor(
            x.clone(), distribution.TensorLayout(layout, mesh)
        )
        for x, layout in ((target, axes), (values, axes_of_values))
    )
    found = write(target, values)
    torch.testing.assert_close(found.full_tensor(), expected)
    torch.testing.assert_close(target.full_tensor(), expected)


@pytest.mark.parametrize("axes", [(M, None), (None, M)])
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_the_gradient_of_what_is_taken(axis, axes, mesh):
    """Of a reshaped tensor, whose gradient needs the same split."""

    def run(x):
        x = keras.ops.reshape(x * 2, (4, 2, 4))
        return keras.ops.take(x, [1, 0, 1], axis=axis)

    check(run, [randn(4, 8)], [axes], mesh)


@pytest.mark.parametrize("dim", [0, 1, -1, -2])
@pytest.mark.parametrize("axes", [(M, None), (None, M)])
def test_the_gradient_of_one_index(axes, dim, mesh):
    """DTensor returns shards of the wrong size for a dim from the end."""
    check(lambda x: torch.select(x * 2, dim, 1), [randn(4, 8)], [axes], mesh)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("axes", [(M, None), (None, M)])
def test_the_gradient_of_a_write_into_a_plain_tensor(axes, transposed, mesh):
    """It is written into by strides, and a split weight decides its layout."""

    def run(x):
        y = torch.arange(32.0, requires_grad=True).reshape(8, 4)
        y = (y.T if transposed else y.reshape(4, 8)) * 1.0
        y[1:3, 2:5] = y[0:2, 3:6] * 2
        return x * y

    check(run, [randn(4, 8)], [axes], mesh)


def test_a_gradient_that_is_accumulated_keeps_its_shards(mesh):
    """A transposed gradient is copied, as its variable has other strides."""
    layout = distribution.TensorLayout((M, None), mesh)
    whole = randn(8, 4)
    table = distribution.distribute_tensor(whole.clone(), layout)
    table.requires_grad_(True)
    counter = CollectiveCounter()
    with counter:
        transposed = table.T.contiguous()
        (transposed * transposed).sum().backward()
    assert counter.total["all_gather"] == [0, 0]
    assert table.grad.placements == table.placements
    torch.testing.assert_close(table.grad.full_tensor(), 2 * whole)


def placed(value, axes, mesh):
    layout = distribution.TensorLayout(axes, mesh)
    return distribution.distribute_tensor(value.clone(), layout)


MASK = torch.arange(32).reshape(4, 8) % 3 == 0
COLUMNS = torch.tensor([3, 1])
IN_PLACE = {
    "add_": lambda x, y: x.add_(y),
    "copy_": lambda x, y: x.copy_(torch.as_tensor(y)),
    "div_": lambda x, y: x.div_(y),
    "fill_": lambda x, y: x.fill_(_number(y)),
    "index_fill_": lambda x, y: x.index_fill_(1, COLUMNS, _number(y)),
    "index_put_": lambda x, y: x.index_put_((COLUMNS,), _row(y)),
    "masked_fill_": lambda x, y: x.masked_fill_(MASK, _number(y)),
    "mul_": lambda x, y: x.mul_(y),
    "pow_": lambda x, y: x.pow_(y),
    "sub_": lambda x, y: x.sub_(y),
}


def _number(y):
    return y.max() if torch.is_tensor(y) else y


def _row(y):
    return y[0] if torch.is_tensor(y) else torch.tensor(y)


VALUES = {
    "plain": lambda x, mesh: x.sum(0),
    "whole": lambda x, mesh: placed(x.sum(0), (None, None), mesh),
    "split": lambda x, mesh: placed(x.sum(0), (None, M), mesh),
    # Each process has a part of the sum.
    "partial": lambda x, mesh: placed(x, (M, None, None), mesh).sum(0),
    "number": lambda x, mesh: 2.0,
}
TARGETS = {
    name: VALUES[name] for name in ("plain", "whole", "split", "partial")
}


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", IN_PLACE)
def test_values_are_written_in_place(name, target, value, mesh):
    x, y = randn(4, 4, 8).abs() + 0.5, randn(4, 8, 4).mT.abs() + 0.5
    expected, given = x.sum(0), VALUES[value](y, mesh)
    IN_PLACE[name](expected, placement.to_full(given))
    found = TARGETS[target](x, mesh)
    IN_PLACE[name](found, given)
    torch.testing.assert_close(placement.to_full(found), expected)
