"""Products and optimizer steps that run on shards, without dispatch."""

import itertools

import keras
import numpy as np
import pytest

if keras.config.backend() != "torch":
    pytest.skip("shards of torch", allow_module_level=True)

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from integration_tests import harness
from integration_tests import torch_ops_test
from integration_tests import zoo
from keras_tp import backend
from keras_tp import distribution
from keras_tp.backend.torch import placement
from keras_tp.backend.torch.collective_counter import CollectiveCounter

M = "model"
mesh = torch_ops_test.mesh
check = torch_ops_test.check
randn = torch_ops_test.randn


class Dispatched(TorchDispatchMode):
    """Notes the operations that are dispatched on DTensors.

    Attributes:
        names: List of strings such as `"aten.bmm.default"`.
    """

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(kind, DTensor) for kind in types):
            self.names.append(str(func))
            return NotImplemented
        return func(*args, **(kwargs or {}))

    @property
    def products(self):
        return [
            n for n in self.names if n.split(".")[1] in ("bmm", "mm", "mul")
        ]


def einsum(equation):
    return lambda x, y: torch.einsum(equation, x, y)


def dense(x, w):
    return torch.matmul(x, w)


# Function, shapes of the operands, what splits them.
PRODUCTS = {
    "column": (dense, (4, 3, 10), (10, 8), (None,) * 3, (None, M)),
    "row": (dense, (4, 3, 8), (8, 5), (None, None, M), (M, None)),
    "batch": (dense, (4, 3, 10), (10, 7), (M, None, None), (None, None)),
    "whole": (dense, (4, 10), (10, 7), (None, None), (None, None)),
    "vector": (dense, (10,), (10, 8), (None,), (None, M)),
    "heads": (
        einsum("abc, cde -> abde"),
        *((4, 3, 10), (10, 8, 6)),
        *((None,) * 3, (None, M, None)),
    ),
    "merged_heads": (
        einsum("abde,dec->abc"),
        *((4, 3, 8, 6), (8, 6, 10)),
        *((None, None, M, None), (M, None, None)),
    ),
    "scores": (
        einsum("aecd,abcd->acbe"),
        *((4, 7, 8, 6), (4, 3, 8, 6)),
        *((None, None, M, None), (None, None, M, None)),
    ),
}
# Not covered: DTensor's own way.
OTHERS = {
    "implicit": (einsum("ab,bc"), (4, 8), (8, 6), (None, M), (M, None)),
    "ellipsis": (
        einsum("...b,bc->...c"),
        *((4, 3, 8), (8, 6)),
        *((None, None, M), (M, None)),
    ),
    "diagonal": (
        einsum("aab,bc->ac"),
        (6, 6, 8),
        (8, 4),
        (None,) * 3,
        (M, None),
    ),
    "summed": (einsum("abc,bd->ad"), (4, 8, 3), (8, 8), (None,) * 3, (None, M)),
    "broadcast": (einsum("ab,bc->abc"), (4, 1), (8, 8), (None,) * 2, (None, M)),
    "two_dims": (einsum("ab,bc->ac"), (4, 8), (8, 6), (M, None), (M, None)),
    "one_of_two": (
        einsum("ab,bc->ac"),
        (4, 8),
        (8, 6),
        (None, None),
        (M, None),
    ),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_products_of_parts(name, mesh):
    function, x, y, *axes = PRODUCTS[name]
    with Dispatched() as dispatched:
        check(function, [randn(*x), randn(*y)], axes, mesh)
    assert dispatched.names and not dispatched.products


@pytest.mark.parametrize("name", OTHERS)
def test_other_products(name, mesh):
    function, x, y, *axes = OTHERS[name]
    with Dispatched() as dispatched:
        check(function, [randn(*x), randn(*y)], axes, mesh)
    assert dispatched.products


def test_a_gradient_of_a_gradient(mesh):
    def penalty(x, w):
        (gradient,) = torch.autograd.grad(
            (torch.matmul(x, w) ** 2).sum(), x, create_graph=True
        )
        return placement.settled((gradient**2).sum())

    axes = [(None, None), (None, M)]
    check(penalty, [randn(4, 10), randn(10, 8) / 10], axes, mesh)


OPTIMIZERS = {
    "sgd": lambda: keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True),
    "adam": lambda: keras.optimizers.Adam(0.01, amsgrad=True),
    "adamw": lambda: keras.optimizers.AdamW(0.01, weight_decay=0.1),
    "adamax": lambda: keras.optimizers.Adamax(0.01),
    "nadam": lambda: keras.optimizers.Nadam(0.01),
    "rmsprop": lambda: keras.optimizers.RMSprop(0.01, 0.9, 0.5, centered=True),
    "adagrad": lambda: keras.optimizers.Adagrad(0.01),
    "adadelta": lambda: keras.optimizers.Adadelta(0.1),
    "lion": lambda: keras.optimizers.Lion(0.01),
    "clipped": lambda: keras.optimizers.Adam(0.01, global_clipnorm=0.1),
    "averaged": lambda: keras.optimizers.Adam(0.01, use_ema=True),
    "accumulated": lambda: keras.optimizers.Adam(
        0.01, gradient_accumulation_steps=2
    ),
}


def variables_and_gradients():
    """Returns two split variables and a whole one."""
    shapes = {"kernel": (6, 8), "row": (12, 4), "bias": (5,)}
    variables = [
        keras.Variable(randn(*shape).numpy(), name=name)
        for name, shape in shapes.items()
    ]
    gradients = [
        [randn(*shape, step + 1).sum(-1) for shape in shapes.values()]
        for step in range(4)
    ]
    return variables, gradients


def train(optimizer, spread):
    """Returns the values of all variables after four steps."""
    variables, gradients = variables_and_gradients()
    for step in gradients:
        optimizer.apply(
            [spread(g, v) for g, v in zip(step, variables)], variables
        )
    state = [*variables, *optimizer.variables]
    return state, [keras.ops.convert_to_numpy(v.value) for v in state]


def gradient_like(gradient, variable):
    return distribution.distribute_tensor(gradient, variable._layout)


def gradient_plain(gradient, variable):
    return gradient


@pytest.mark.parametrize("spread", [gradient_like, gradient_plain])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers(name, spread, mesh):
    distribution.set_distribution(None)
    _, expected = train(OPTIMIZERS[name](), gradient_plain)
    layouts = {"kernel": (None, M), "row": (M, None)}
    with harness.model_parallel(layouts, mesh.shape).scope():
        state, actual = train(OPTIMIZERS[name](), spread)
    split = [v for v in state if placement.needs_communication(v.value)]
    # Their slots too, where the optimizer has some.
    assert len(split) >= 2
    for a, b in zip(actual, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_the_optimizer_dispatches_nothing(mesh):
    with harness.model_parallel({"kernel": (None, M)}, mesh.shape).scope():
        variables, gradients = variables_and_gradients()
        optimizer = keras.optimizers.Adam(0.01)
        optimizer.build(variables)
        step = [gradient_like(g, v) for g, v in zip(gradients[0], variables)]
        with torch.no_grad(), Dispatched() as dispatched:
            optimizer.apply(step, variables)
    assert not [name for name in dispatched.names if "foreach" in name]
    assert dispatched.names == []


def test_slots_that_are_not_split_as_their_variable(mesh):
    distribution.set_distribution(None)
    _, expected = train(keras.optimizers.Adam(0.01), gradient_plain)
    with harness.model_parallel({"kernel": (None, M)}, mesh.shape).scope():
        optimizer = keras.optimizers.Adam(0.01)
        variables, gradients = variables_and_gradients()
        optimizer.build(variables)
        slot = optimizer._momentums[0]
        whole = distribution.TensorLayout((None, None), mesh)
        backend.distribution_lib.relayout_variable(slot, whole)
        for step in gradients:
            optimizer.apply(
                [gradient_like(g, v) for g, v in zip(step, variables)],
                variables,
            )
        state = [*variables, *optimizer.variables]
        actual = [keras.ops.convert_to_numpy(v.value) for v in state]
        assert not placement.needs_communication(slot.value)
    for a, b in zip(actual, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_an_update_in_a_stateless_scope_changes_nothing(mesh):
    case = zoo.CASES["dropout"]
    with harness.model_parallel(case.layouts, mesh.shape).scope():
        model = harness.build(case)
        optimizer = keras.optimizers.Adam(0.1)
        optimizer.build(model.trainable_variables)
        before = model.get_weights()
        values = [v.value.detach() for v in model.trainable_variables]
        with torch.no_grad():
            after, _ = optimizer.stateless_apply(
                [v.value.detach().clone() for v in optimizer.variables],
                [torch.ones_like(v) for v in values],
                [v.clone() for v in values],
            )
        for a, b in zip(model.get_weights(), before):
            np.testing.assert_array_equal(a, b)
        assert any(
            not np.array_equal(placement.to_full(a), placement.to_full(b))
            for a, b in zip(after, values)
        )


def test_repeated_heads_are_not_gathered(mesh):
    """3 heads of keys for 12 of queries; `check` runs the function twice."""
    size = 4 * 3 * 5 * 4
    # Made when first asked for, by collectives of its own.
    assert mesh.backend_mesh is not None
    with CollectiveCounter() as counter:
        check(
            lambda x, y: keras.ops.repeat(x, 4, axis=1) * y,
            [randn(4, 3, 5), randn(4, 12, 5)],
            [(None,) * 3, (None, M, None)],
            mesh,
        )
    # The test itself gathers two results and a split gradient.
    assert tuple(counter.total["all_gather"]) == (3, 3 * 4 * size)
    assert tuple(counter.total["all_reduce"]) == (2, 2 * size)


BATCHES = {
    "heads": ((2, 4, 6, 3), (2, 4, 3, 6)),
    "one head of keys": ((2, 4, 6, 3), (2, 1, 3, 6)),
    "one head of queries": ((2, 1, 6, 3), (2, 4, 3, 6)),
    "fewer dims": ((2, 4, 6, 3), (4, 3, 6)),
    "a matrix": ((6, 4), (2, 4, 6)),
    "both broadcast": ((1, 4, 6, 3), (2, 1, 3, 6)),
}


@pytest.mark.parametrize("name", BATCHES)
def test_products_of_batches(name, mesh):
    """Each even dim of each operand is split in turn, and of both."""
    shapes = BATCHES[name]
    splits = [
        [
            tuple(M if j == i else None for j in range(len(shape)))
            for i in (None, *range(len(shape)))
            if i is None or shape[i] % mesh.shape[1] == 0
        ]
        for shape in shapes
    ]
    for a, b in itertools.product(*splits):
        check(torch.matmul, [randn(*s) for s in shapes], [a, b], mesh)


def test_one_head_of_keys_gathers_nothing(mesh):
    layout = (None, M, None, None)
    with CollectiveCounter() as counter:
        x, y = (
            distribution.distribute_tensor(
                randn(*shape), distribution.TensorLayout(axes, mesh)
            )
            for shape, axes in (
                ((2, 4, 6, 3), layout),
                ((2, 1, 3, 6), (None,) * 4),
            )
        )
        z = torch.matmul(x.requires_grad_(), y.requires_grad_())
        z.sum().backward()
    assert z.placements == x.placements
    assert counter.total["all_gather"] == [0, 0]
