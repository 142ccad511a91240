"""Operations without a rule that DTensor cannot run or computes whole.

`LISTED_REFUSED` and `LISTED_WHOLE` are the limits of the backend, with reasons.
The tests show that the lists are right, and that what tensor parallelism is
made of is not on them. Names are TensorFlow's operation names, as in errors and
graphs; `stateless_*` are functions of `tf.random`. Other operations have a rule
in `ops/table.py`, or DTensor splits them.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import ops
from tensorflow.experimental import dtensor

import keras_tp
from keras_tp import distribution as dist
from keras_tp.backend.tensorflow import errors
from keras_tp.backend.tensorflow import placement

# Each raises an error with its name; DTensor's errors name the layer too.
LISTED_REFUSED = {
    "DTensor has no expansion of a decomposition": (
        "Cholesky",
        "LogMatrixDeterminant",
        "Lu",
        "MatrixDeterminant",
        "MatrixInverse",
        "MatrixSolve",
        "MatrixTriangularSolve",
        "SelfAdjointEigV2",
        "Svd",
    ),
    "DTensor has no expansion of a change of an image's geometry": (
        "DepthToSpace",
        "ExtractImagePatches",
        "SpaceToDepth",
    ),
    "DTensor has no layout for the lists of a loop": ("TensorListStack",),
    "DTensor has no expansion": (
        "Cross",
        "Cumprod",
        "DenseBincount",
        "Tile",
        "UnsortedSegmentMax",
    ),
    "the numbers would depend on the mesh": (
        "stateless_binomial",
        "stateless_gamma",
        "stateless_truncated_normal",
    ),
}

# Every device computes the whole operation, whatever is split.
LISTED_WHOLE = {
    "needs all of a dim, and DTensor gathers the others with it": (
        "Cumsum",
        "TopKV2",
    ),
    "DTensor replicates what it has no expansion of its own for": (
        "Qr",
        "TensorScatterUpdate",
    ),
    "a convolution in groups, or of channels that come first": ("Conv2D",),
}

VECTORS = (4, 6)
SQUARE = (4, 4)
IMAGES = (2, 6, 6, 4)

# Operation: shape of its input, whose last dim is split over two devices, and
# what Keras does with it.
REFUSED = {
    "Cholesky": (SQUARE, ops.cholesky),
    "LogMatrixDeterminant": (SQUARE, ops.slogdet),
    "Lu": (SQUARE, ops.lu_factor),
    "MatrixDeterminant": (SQUARE, ops.det),
    "MatrixInverse": (SQUARE, ops.inv),
    "MatrixSolve": (SQUARE, lambda x: ops.solve(x, ops.ones((4, 2)))),
    "MatrixTriangularSolve": (
        SQUARE,
        lambda x: ops.solve_triangular(x, ops.ones((4, 2))),
    ),
    "SelfAdjointEigV2": (SQUARE, ops.eigh),
    "Svd": (SQUARE, ops.svd),
    "DepthToSpace": (IMAGES, lambda x: ops.depth_to_space(x, 2)),
    "ExtractImagePatches": (IMAGES, lambda x: ops.unfold(x, 2)),
    "SpaceToDepth": (IMAGES, lambda x: ops.space_to_depth(x, 2)),
    "TensorListStack": (VECTORS, lambda x: ops.map(lambda row: row * 2, x)),
    "Cross": ((3, 4, 3, 2), lambda x: ops.cross(x, x + 1, axis=2)),
    "Cumprod": (VECTORS, lambda x: ops.cumprod(x, -1)),
    "DenseBincount": (
        VECTORS,
        lambda x: ops.bincount(ops.cast(ops.abs(x), "int32"), minlength=6),
    ),
    "Tile": (VECTORS, lambda x: ops.tile(x, (1, 2))),
    "UnsortedSegmentMax": (
        VECTORS,
        lambda x: ops.segment_max(x, ops.array([0, 0, 1, 2]), 3),
    ),
    "stateless_binomial": (
        VECTORS,
        lambda x: x + keras.random.binomial((4, 6), 2.0, 0.5, seed=1),
    ),
    "stateless_gamma": (
        VECTORS,
        lambda x: x + keras.random.gamma((4, 6), 1.0, seed=1),
    ),
    "stateless_truncated_normal": (
        VECTORS,
        lambda x: x + keras.random.truncated_normal((4, 6), seed=1),
    ),
}
WHOLE = {
    "Cumsum": (VECTORS, lambda x: ops.cumsum(x, -1)),
    "TopKV2": (VECTORS, lambda x: ops.top_k(x, 2)),
    "Qr": (VECTORS, ops.qr),
    "TensorScatterUpdate": (
        VECTORS,
        lambda x: ops.scatter_update(x, np.array([[0, 1]]), np.ones(1, "f")),
    ),
    "Conv2D": (IMAGES, lambda x: ops.conv(x, ops.ones((2, 2, 2, 8)))),
}
# What tensor parallelism is made of: Dense, EinsumDense, Embedding, attention.
SPLIT = {
    "MatMul",
    "BatchMatMulV2",
    "Einsum",
    "XlaEinsum",
    "GatherV2",
    "ResourceGather",
    "Softmax",
    "LogSoftmax",
}


def names(listed):
    return [name for group in listed.values() for name in group]


def run(shape, function):
    """Runs a function on a tensor whose last dim is split over two devices."""
    value = np.random.default_rng(0).normal(size=shape).astype("float32")
    if shape == SQUARE:
        value = value @ value.T + 4 * np.eye(4, dtype="float32")
    expected = keras.tree.flatten(function(tf.constant(value)))
    mesh = dist.DeviceMesh((2,), ["model"], dist.list_devices()[:2])
    mesh = mesh.backend_mesh
    specs = [dtensor.UNSHARDED] * (len(shape) - 1) + ["model"]
    placed = placement.place(value, dtensor.Layout(specs, mesh))
    keras_tp.install()
    with placement.on_mesh(mesh), errors.explained():
        found = tf.function(function, autograph=False)(placed)
    return keras.tree.flatten(found), expected


def test_every_entry_has_a_case_and_a_reason():
    assert sorted(names(LISTED_REFUSED)) == sorted(REFUSED)
    assert sorted(names(LISTED_WHOLE)) == sorted(WHOLE)
    assert not SPLIT & {*REFUSED, *WHOLE}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_is_named(name):
    with pytest.raises(NotImplementedError, match=name):
        run(*REFUSED[name])


@pytest.mark.parametrize("name", WHOLE)
def test_what_is_computed_whole(name):
    found, expected = run(*WHOLE[name])
    for actual, wanted in zip(found, expected, strict=True):
        assert dtensor.fetch_layout(actual).is_fully_replicated()
        np.testing.assert_allclose(
            placement.read(actual), wanted, rtol=1e-5, atol=1e-5
        )


@pytest.mark.parametrize(
    "function",
    [
        lambda x: ops.matmul(ops.ones((2, 4)), x),
        lambda x: ops.einsum("bi,io->bo", ops.ones((2, 4)), x),
        lambda x: ops.take(x, np.array([1, 3]), 0),
        lambda x: ops.stack([x, x]),
        lambda x: x[None, 1],
    ],
    ids=["matmul", "einsum", "take", "stack", "index"],
)
def test_what_stays_split(function):
    (found,), (expected,) = run(VECTORS, function)
    assert dtensor.fetch_layout(found).sharding_specs[-1] == "model"
    np.testing.assert_allclose(placement.read(found), expected, rtol=1e-5)
