"""Products between activations that are split along the sequence."""

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
from keras_tp.backend.jax import processes

COUNT, LENGTH, WIDTH = 4, 8, 16
X = np.random.default_rng(0).normal(size=(2, LENGTH, WIDTH)).astype("float32")
INDICES = np.random.default_rng(0).integers(0, 12, (2, LENGTH)).astype("int32")


@pytest.fixture(autouse=True)
def parallel():
    mesh = distribution.DeviceMesh(
        (1, COUNT), ["batch", "model"], distribution.list_devices()[:COUNT]
    )
    layout_map = distribution.LayoutMap(mesh)
    with distribution.ModelParallel(
        layout_map=layout_map, batch_dim_name="batch"
    ).scope():
        yield mesh


def variable(mesh, shape, axes, blocks=None):
    layout = layout_with(axes, mesh, uneven=True, blocks=blocks)
    layout.sequence_parallel = True
    value = np.random.default_rng(1).normal(size=shape)
    return keras.Variable(value.astype("float32"), layout=layout)


def run(function, *inputs):
    """Returns results, and the number of collectives by kind.

    Those of the gradient are counted too.
    """

    def step(*inputs):
        with StatelessScope():
            return function(*inputs)

    def gradient(of_results, *inputs):
        results, backward = jax.vjp(step, *inputs)
        return results, backward(of_results)

    found = jax.jit(step)(*inputs)
    of_results = jax.tree.map(lambda x: np.asarray(x) + 1, found)
    program = jax.jit(gradient).lower(of_results, *inputs).compile()
    counted = hlo_collectives.count(program.as_text())
    return found, {kind: pair[0] for kind, pair in counted.items() if pair[0]}


def assert_close(found, expected):
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected)):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def test_products_share_a_gather(parallel):
    kernels = [variable(parallel, (WIDTH, 12), (None, "model")) for _ in "qkv"]
    found, counted = run(
        lambda x: [keras.ops.matmul(x, kernel) for kernel in kernels], X
    )
    assert_close(found, [X @ np.array(kernel) for kernel in kernels])
    assert counted == {"all_gather": 1, "reduce_scatter": 1}


def test_an_einsum_scatters_its_sum(parallel):
    kernel = variable(parallel, (4, 4, 6), ("model", None, None))
    x = X.reshape(2, LENGTH, 4, 4)
    found, counted = run(
        lambda x: keras.ops.einsum("abcd,cde->abe", x, kernel), x
    )
    assert_close(found, np.einsum("abcd,cde->abe", x, np.array(kernel)))
    assert counted == {"all_gather": 1, "reduce_scatter": 1}


def test_a_lookup_in_a_padded_table(parallel):
    table = variable(parallel, (13, WIDTH), ("model", None))
    indices = INDICES.copy()
    indices[0, :3] = -1, 12, 13
    found, _ = run(lambda i: keras.ops.take(table, i, axis=0), indices)
    expected = jax.numpy.take(np.array(table), indices, axis=0)
    assert np.isnan(expected[0, 2]).all(), "as in plain JAX"
    assert_close(found, expected)


def test_a_transposed_and_padded_table(parallel):
    table = variable(parallel, (13, WIDTH), ("model", None))
    found, counted = run(
        lambda x: keras.ops.matmul(x, keras.ops.transpose(table)), X
    )
    assert_close(found, X @ np.array(table).T)
    # A result that the devices do not divide leaves a program whole.
    assert counted == {"all_gather": 2, "reduce_scatter": 1}


def test_blocks_of_one_kernel(parallel):
    kernel = variable(parallel, (WIDTH, 24), (None, "model"), {1: 3})

    def three(x):
        return keras.ops.split(keras.ops.matmul(x, kernel), 3, axis=-1)

    found, counted = run(three, X)
    assert_close(found, np.split(X @ np.array(kernel), 3, axis=-1))
    assert counted == {"all_gather": 1, "reduce_scatter": 1}


@pytest.mark.parametrize(
    "equation", ["abc,cd->bad", "abc,cd->ad", "...c,cd->...d"]
)
def test_other_products_are_those_of_keras(equation, parallel):
    kernel = variable(parallel, (WIDTH, 12), (None, "model"))
    found, _ = run(lambda x: keras.ops.einsum(equation, x, kernel), X)
    assert_close(found, np.einsum(equation, X, np.array(kernel)))


def test_a_sequence_that_does_not_divide(parallel):
    kernel = variable(parallel, (WIDTH, 12), (None, "model"))
    x = X[:, :7]
    with pytest.warns(UserWarning, match="7 positions does not divide by 4"):
        found, _ = run(lambda x: keras.ops.matmul(x, kernel), x)
    assert_close(found, x @ np.array(kernel))


def test_processes_on_cpus_use_no_reduce_scatter(parallel, monkeypatch):
    """Theirs is wrong for large parts, without an error."""
    monkeypatch.setattr(processes, "are_on_cpus", lambda: True)
    up = variable(parallel, (WIDTH, 12), (None, "model"))
    down = variable(parallel, (12, WIDTH), ("model", None))
    found, counted = run(
        lambda x: keras.ops.matmul(keras.ops.matmul(x, up), down), X
    )
    assert_close(found, X @ np.array(up) @ np.array(down))
    assert counted == {"all_reduce": 4}
    monkeypatch.undo()
    _, counted = run(
        lambda x: keras.ops.matmul(keras.ops.matmul(x, up), down), X
    )
    assert counted == {"all_gather": 2, "reduce_scatter": 2}
