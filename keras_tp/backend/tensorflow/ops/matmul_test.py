"""Products of inputs that are split in every way, as on one device."""

import itertools
import os

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.experimental import dtensor

from keras_tp import distribution as dist
from keras_tp.backend.tensorflow import placement

PRODUCTS = {
    "abc,abc->": ((4, 6, 8), (4, 6, 8)),
    "abc,abc->b": ((4, 6, 8), (4, 6, 8)),
    "abc,abd->cd": ((4, 6, 8), (4, 6, 2)),
    "abc,bcd->ad": ((4, 6, 8), (6, 8, 2)),
    "abcd,abcd->c": ((2, 4, 6, 8), (2, 4, 6, 8)),
    "abcd,abce->de": ((2, 4, 6, 8), (2, 4, 6, 2)),
    "abcd,cde->abe": ((2, 4, 6, 8), (6, 8, 2)),
    "ab...,bc->ac...": ((2, 4, 6, 8), (4, 2)),
    "abc,cde->abde": ((4, 6, 8), (8, 4, 2)),
    "matmul": ((4, 6, 8), (2, 4, 8, 6)),
    "matmul by a matrix": ((4, 2, 6, 8), (8, 6)),
    # With a size of 1 on each device, TensorFlow's product corrupts memory.
    "matmul by shared matrices": ((4, 2, 12, 16), (1, 2, 16, 14)),
    "matmul by a shared matrix": ((4, 2, 12, 16), (1, 1, 16, 14)),
    "matmul by matrices of heads": ((4, 2, 12, 16), (2, 16, 14)),
}
IN_CI = (
    *("abc,cde->abde", "matmul by a matrix", "matmul by shared matrices"),
    *("abc,abd->cd", "abc,bcd->ad", "abcd,abcd->c", "matmul"),
)
SLOW = os.environ.get("KERAS_TP_SLOW") == "1"


@pytest.fixture
def mesh():
    mesh = dist.DeviceMesh((1, 2), ["batch", "model"], dist.list_devices()[:2])
    layout_map = dist.LayoutMap(mesh)
    with dist.ModelParallel(layout_map=layout_map).scope():
        yield mesh


def layout(rank, dim, mesh):
    axes = ["model" if d == dim else None for d in range(rank)]
    return dist.TensorLayout(axes, mesh).backend_layout


def product_of(name):
    if name.startswith("matmul"):
        return keras.ops.matmul
    return lambda x, y: keras.ops.einsum(name, x, y)


def with_gradients(product, x, y):
    with tf.GradientTape() as tape:
        tape.watch([x, y])
        result = product(x, y)
        loss = tf.reduce_sum(result * result)
    return (result, *tape.gradient(loss, [x, y]))


# Weights are known to be split while a step is traced; other tensors are not.
@pytest.mark.parametrize("weights", [True, False], ids=["weights", "tensors"])
@pytest.mark.parametrize("name", PRODUCTS if SLOW else IN_CI)
def test_inputs_that_are_split_along_any_dims(name, weights, mesh):
    shapes, product = PRODUCTS[name], product_of(name)
    rng = np.random.default_rng(len(name))
    arrays = [rng.standard_normal(s).astype("float32") for s in shapes]
    expected = with_gradients(product, *map(tf.constant, arrays))
    dims = [
        (None, *(dim for dim, size in enumerate(shape) if size > 1))
        for shape in shapes
    ]
    for split in itertools.product(*dims):
        with placement.on_mesh(mesh.backend_mesh, "batch"):
            placed = [
                placement.place(array, layout(array.ndim, dim, mesh))
                for array, dim in zip(arrays, split)
            ]
            held = [dtensor.DVariable(value) for value in placed]

            @tf.function
            def step(x, y, held=held):
                if weights:
                    x, y = [variable.read_value() for variable in held]
                return with_gradients(product, x, y)

            results = step(*placed)
        for got, value in zip(results, expected):
            np.testing.assert_allclose(
                placement.read(got),
                value,
                rtol=1e-4,
                atol=1e-4,
                err_msg=f"split along {split}",
            )


def test_the_gradient_of_a_matrix_has_no_copy_for_each_example(mesh):
    """As a projection of attention has with plain Keras on TensorFlow."""
    x, y = tf.ones((4, 6, 8)), tf.ones((8, 4, 2))
    with placement.on_mesh(mesh.backend_mesh, "batch"):
        step = tf.function(
            lambda x, y: with_gradients(product_of("abc,cde->abde"), x, y)
        )
        graph = step.get_concrete_function(x, y).graph
    products = [op for op in graph.get_operations() if "MatMul" in op.type]
    assert products
    assert max(len(op.outputs[0].shape) for op in products) == 2


@pytest.mark.parametrize("rank", [3, 4, 5])
def test_a_split_that_moves_to_another_dim(rank, mesh):
    """With an all-to-all, TensorFlow mixes up the parts from four dims on."""
    value = np.arange(8**rank, dtype="float32").reshape((8,) * rank)
    for before, after in itertools.permutations(range(rank), 2):
        with placement.on_mesh(mesh.backend_mesh, "batch"):
            placed = placement.place(value, layout(rank, before, mesh))
            to = layout(rank, after, mesh)
            moved = tf.function(dtensor.relayout)(placed, to)
        np.testing.assert_array_equal(placement.read(moved), value)
        assert dtensor.fetch_layout(moved).sharding_specs[after] == "model"
