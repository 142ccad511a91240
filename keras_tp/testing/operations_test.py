"""Functions of `keras.ops` on split activations, with their gradients."""

import keras
import numpy as np
import pytest
from keras import ops

from keras_tp import distribution
from keras_tp.testing import models

HEADS, SIZE = models.HEADS, 8
# Each function takes a tensor of shape (batch, HEADS, SIZE), and gives one
# whose first dim is the batch.
FAMILIES = {
    "elementwise": {
        "abs": ops.abs,
        "add": lambda x: x + ops.flip(x * 0 + 1, -1),
        "clip": lambda x: ops.clip(x, -0.5, 0.5),
        "cos": ops.cos,
        "divide": lambda x: 1 / (2 + ops.abs(x)),
        "elu": ops.elu,
        "exp": ops.exp,
        "gelu": ops.gelu,
        "leaky_relu": ops.leaky_relu,
        "log1p": lambda x: ops.log1p(ops.abs(x)),
        "maximum": lambda x: ops.maximum(x, 0.1),
        "power": lambda x: ops.power(ops.abs(x) + 1, 1.5),
        "relu": ops.relu,
        "rsqrt": lambda x: ops.rsqrt(ops.square(x) + 1),
        "sigmoid": ops.sigmoid,
        "silu": ops.silu,
        "softplus": ops.softplus,
        "square": ops.square,
        "tanh": ops.tanh,
        "where": lambda x: ops.where(x > 0, x, 2 * x),
    },
    "reductions": {
        "amax": lambda x: ops.amax(x, -1),
        "amax_heads": lambda x: ops.amax(x, 1),
        "amin": lambda x: ops.amin(x, (1, 2)),
        "cumsum": lambda x: ops.cumsum(x, -1),
        "cumsum_heads": lambda x: ops.cumsum(x, 1),
        "log_softmax": ops.log_softmax,
        "logsumexp": lambda x: ops.logsumexp(x, -1),
        "mean": lambda x: ops.mean(x, (1, 2)),
        "norm": lambda x: ops.norm(x, axis=-1),
        "softmax": ops.softmax,
        "softmax_heads": lambda x: ops.softmax(x, 1),
        "std": lambda x: ops.std(x, -1),
        "sum": lambda x: ops.sum(x, -1),
        "sum_heads": lambda x: ops.sum(x, 1),
        "var": lambda x: ops.var(x, (1, 2)),
    },
    "shapes": {
        "broadcast_to": lambda x: ops.broadcast_to(
            x[:, None], (models.BATCH, 2, HEADS, SIZE)
        ),
        "concatenate": lambda x: ops.concatenate([x, 2 * x], -1),
        "concatenate_heads": lambda x: ops.concatenate([x, 2 * x], 1),
        "expand_dims": lambda x: ops.expand_dims(x, 1),
        "flip": lambda x: ops.flip(x, -1),
        "merge": lambda x: ops.reshape(x, (-1, HEADS * SIZE)),
        "pad": lambda x: ops.pad(x, [(0, 0), (1, 1), (0, 2)]),
        "repeat": lambda x: ops.repeat(x, 2, 1),
        "roll": lambda x: ops.roll(x, 1, -1),
        "split": lambda x: ops.split(x, 2, -1)[1],
        "split_dim": lambda x: ops.reshape(x, (-1, HEADS, 2, SIZE // 2)),
        "split_heads": lambda x: ops.split(x, 2, 1)[1],
        "squeeze": lambda x: ops.squeeze(x[:, :1], 1),
        "stack": lambda x: ops.stack([x, 3 * x], 1),
        "swapaxes": lambda x: ops.swapaxes(x, 1, 2),
        "transpose": lambda x: ops.transpose(x, (0, 2, 1)),
    },
    "products": {
        "einsum_heads": lambda x: ops.einsum("bhs,bhr->bsr", x, x),
        "einsum_sizes": lambda x: ops.einsum("bhs,bgs->bhg", x, x),
        "matmul": lambda x: ops.matmul(x, ops.transpose(x, (0, 2, 1))),
        "matmul_table": lambda x: ops.matmul(x, ops.eye(SIZE) + 0.5),
        "tensordot": lambda x: ops.tensordot(x, ops.ones((SIZE, 3)), 1),
    },
    "positions": {
        "arange": lambda x: x * ops.cast(ops.arange(SIZE), x.dtype),
        "argmax": lambda x: x[:, :, 0] + ops.cast(ops.argmax(x, -1), x.dtype),
        "argmax_heads": lambda x: x[:, 0] + ops.cast(ops.argmax(x, 1), x.dtype),
        "one_hot": lambda x: x * ops.one_hot(ops.argmax(x, -1), SIZE),
        "slice": lambda x: x[:, 1:3, 2:5],
        "slice_one": lambda x: x[:, 2],
        "slice_strided": lambda x: x[..., ::2],
        "sort": lambda x: ops.sort(x, -1),
        "take": lambda x: ops.take(x, np.array([3, 1, 1]), 2),
        "take_along_axis": lambda x: ops.take_along_axis(
            x, ops.argsort(x, -1), -1
        ),
        "take_heads": lambda x: ops.take(x, np.array([3, 1, 1]), 1),
        "top_k": lambda x: ops.top_k(x, 3)[0],
        "tril": ops.tril,
    },
}


# Without gradients on some backend of Keras.
ONLY_VALUES = {
    "median": lambda x: ops.median(x, -1),
    "median_heads": lambda x: ops.median(x, 1),
    "quantile": lambda x: ops.quantile(x, 0.3, 1),
    "scatter": lambda x: ops.scatter(
        np.array([[0], [2], [1], [3]]), x, (5, HEADS, SIZE)
    )[:4],
    "slice_update": lambda x: ops.slice_update(x, (0, 0, 1), 2 * x[:, :, :2]),
    "stft": lambda x: ops.stft(x, 4, 2, 4)[0],
}
FUNCTIONS_OF_LARGEST = {"top_k": lambda x: ops.top_k(x, 2)[0]}
# Splits of the kernel of shape (WIDTH, HEADS, SIZE), so of what it gives.
SPLITS = {"heads": (None, "model", None), "sizes": (None, None, "model")}


class Apply(keras.layers.Layer):
    """Applies functions, and gives a number for each function and sample."""

    def __init__(self, functions):
        super().__init__()
        self.functions = functions

    def call(self, x):
        outputs = []
        for function in self.functions.values():
            y = function(x)
            # A wrong place, or a gradient of a wrong place, gives another sum.
            weights = np.random.default_rng(2).uniform(0.5, 1.5, y.shape[1:])
            y = y * ops.convert_to_tensor(weights, y.dtype)
            outputs.append(ops.sum(y, tuple(range(1, len(y.shape)))))
        return ops.stack(outputs, -1)


def build(functions):
    """Returns a model of the functions, behind a kernel that can be split."""
    inputs = keras.Input((models.WIDTH,), models.BATCH)
    x = keras.layers.EinsumDense(
        "bi,ihs->bhs", (HEADS, SIZE), bias_axes="hs", name="up"
    )(inputs)
    return keras.Model(inputs, Apply(functions)(x))


def outcome(functions):
    """Returns what the functions give, and the weights after one step."""
    keras.utils.set_random_seed(1)
    model = build(functions)
    model.compile(keras.optimizers.SGD(1e-3), "mse")
    x = models.CASES["pair"].x
    outputs = model.predict_on_batch(x)
    model.train_on_batch(x, np.zeros_like(outputs))
    return model, outputs, models.values(model)


def layouts(dim):
    layout_map = distribution.LayoutMap(models.mesh())
    layout_map[".*up/kernel"] = SPLITS[dim]
    layout_map[".*up/bias"] = SPLITS[dim][1:]
    return distribution.ModelParallel(layout_map=layout_map)


def compare(functions, found, expected):
    scale = np.abs(expected).max(0) + 1
    wrong = np.abs(found - expected).max(0) / scale > 1e-5
    assert not wrong.any(), np.array(list(functions))[wrong]


@pytest.mark.parametrize(
    ("family", "dim"),
    # For functions of single elements, one split is like the other.
    [(f, d) for f in FAMILIES for d in SPLITS][1:],
)
def test_values_and_gradients(family, dim):
    functions = FAMILIES[family]
    _, expected, weights = outcome(functions)
    with layouts(dim).scope():
        model, found, values = outcome(functions)
    assert models.split(model) == {"up/kernel", "up/bias"}
    compare(functions, found, expected)
    models.assert_close(values, weights)


@pytest.mark.parametrize("dim", SPLITS)
def test_values(dim):
    def run():
        keras.utils.set_random_seed(1)
        model = build(ONLY_VALUES)
        return model, model.predict(models.CASES["pair"].x, verbose=0)

    _, expected = run()
    with layouts(dim).scope():
        model, found = run()
    assert models.split(model) == {"up/kernel", "up/bias"}
    compare(ONLY_VALUES, found, expected)


def test_a_cache_of_heads_is_written_without_a_gather():
    def write(x):
        cache = ops.zeros((models.BATCH, HEADS, 2 * SIZE))
        return ops.slice_update(
            cache + 0 * ops.tile(x, (1, 1, 2)), (0, 0, 3), x
        )

    with layouts("heads").scope():
        model = build({"write": write})
        found = distribution.count_collectives(model, models.CASES["pair"].x)
    assert models.split(model) == {"up/kernel", "up/bias"}
    assert not found["all_gather"].count


def test_the_largest_values_are_found_without_a_gather():
    units = 512
    layout_map = distribution.LayoutMap(models.mesh())
    layout_map[".*up/kernel"] = models.COLUMN
    x = models.CASES["pair"].x
    with distribution.ModelParallel(layout_map=layout_map).scope():
        inputs = keras.Input((models.WIDTH,), models.BATCH)
        y = keras.layers.Dense(units, use_bias=False, name="up")(inputs)
        model = keras.Model(inputs, Apply(FUNCTIONS_OF_LARGEST)(y))
        found = distribution.count_collectives(model, x)
    assert models.split(model)
    for kind, (_, size) in found.items():
        assert size < 4 * models.BATCH * units / 4, kind
