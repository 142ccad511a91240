"""What one step communicates, compared with what theory asks for."""

import math
import random

import keras
import numpy as np
import pytest
from keras import layers

from integration_tests import harness
from integration_tests import zoo
from keras_tp import distribution

BATCH = 4
FEATURES = 12
NAMES = (
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "collective_permute",
)
SHAPES = harness.shapes((1, 2), (1, 4))


def floats(*shape):
    return np.random.default_rng(0).standard_normal(shape, "float32")


def counts(model, x, y=None):
    """Returns what was counted, without the collectives that are not there."""
    found = distribution.count_collectives(model, x, y)
    assert tuple(found) == NAMES
    return {name: pair for name, pair in found.items() if pair[0]}


def pairs(widths, first=None):
    """Column and row pairs, one after the other, behind a layer or none.

    Args:
        widths: List of pairs of ints, the units of the two layers.
        first: Layer without any layout, so that the input of the first pair
            needs a gradient.
    """
    inputs = keras.Input((FEATURES,))
    x = inputs if first is None else first(inputs)
    for index, (up, down) in enumerate(widths):
        x = zoo.dense(up, f"up_{index}", activation="relu")(x)
        x = zoo.dense(down, f"down_{index}")(x)
    model = keras.Model(inputs, x, name="pairs")
    model.compile("sgd", "mse")
    return model


PAIRS = {
    "up_.*/kernel": (None, "model"),
    "up_.*/bias": ("model",),
    "down_.*/kernel": ("model", None),
}


@SHAPES
def test_one_pair_as_the_first_layers(shape):
    with harness.model_parallel(PAIRS, shape).scope():
        model = pairs([(16, 5)])
    assert counts(model, floats(BATCH, FEATURES), floats(BATCH, 5)) == {
        "all_reduce": (1, BATCH * 5 * 4)
    }


@SHAPES
def test_one_pair_whose_input_needs_a_gradient(shape):
    with harness.model_parallel(PAIRS, shape).scope():
        model = pairs([(16, 5)], layers.Dense(10, name="first"))
    assert counts(model, floats(BATCH, FEATURES), floats(BATCH, 5)) == {
        # Forward the output of the pair, backward the gradient of its input.
        "all_reduce": (2, BATCH * (5 + 10) * 4)
    }


@SHAPES
def test_one_pair_behind_an_embedding(shape):
    with harness.model_parallel(PAIRS, shape).scope():
        inputs = keras.Input((6,), dtype="int32")
        x = layers.Embedding(24, 10, name="tokens")(inputs)
        x = zoo.dense(16, "up_0", activation="relu")(x)
        model = keras.Model(inputs, zoo.dense(5, "down_0")(x), name="embedded")
        model.compile("sgd", "mse")
    tokens = np.arange(24, dtype="int32").reshape(BATCH, 6)
    assert counts(model, tokens, floats(BATCH, 6, 5)) == {
        "all_reduce": (2, BATCH * 6 * (5 + 10) * 4)
    }


@SHAPES
def test_a_split_vocabulary(shape):
    """The rows that were looked up are summed; the table is not gathered."""
    case = zoo.CASES["embedding_rows"]
    with harness.model_parallel(case.layouts, shape).scope():
        model = harness.build(case)
        model.compile("sgd", case.loss)
    x, y = harness.data_of(case)
    rows = {"all_reduce": (1, x.size * zoo.UNITS * 4)}
    assert counts(model, x, y) == rows
    assert counts(model, x) == rows


@SHAPES
@pytest.mark.parametrize("stacked", [2, 3])
def test_stacked_pairs(stacked, shape):
    widths = [(16, 5), (8, 7), (24, 6)][:stacked]
    with harness.model_parallel(PAIRS, shape).scope():
        model = pairs(widths)
    outputs = [down for _, down in widths]
    x, y = floats(BATCH, FEATURES), floats(BATCH, outputs[-1])
    # Forward the output of each pair, backward the gradient of the input of
    # each but the first; the input of one is the output of the one before.
    assert counts(model, x, y) == {
        "all_reduce": (
            2 * stacked - 1,
            BATCH * (sum(outputs) + sum(outputs[:-1])) * 4,
        )
    }
    assert counts(model, x) == {
        "all_reduce": (stacked, BATCH * sum(outputs) * 4)
    }


@SHAPES
def test_a_layout_that_is_left_out_costs_more(shape):
    """The row kernel is whole: what meets it has to be made whole too."""
    layouts = {p: axes for p, axes in PAIRS.items() if "down" not in p}
    x, y = floats(BATCH, FEATURES), floats(BATCH, 5)
    with harness.model_parallel(PAIRS, shape).scope():
        paired = pairs([(16, 5)])
    with harness.model_parallel(layouts, shape).scope():
        unpaired = pairs([(16, 5)])
    good, bad = counts(paired, x, y), counts(unpaired, x, y)
    assert good == {"all_reduce": (1, BATCH * 5 * 4)}
    assert "all_gather" in bad, bad
    assert sum(n for _, n in bad.values()) > sum(n for _, n in good.values())


def transformer(blocks, length, hidden, heads, intermediate):
    inputs = keras.Input((length,), dtype="int32")
    x = layers.Embedding(24, hidden, name="tokens")(inputs)
    for index in range(blocks):
        y = layers.LayerNormalization(name=f"norm_a_{index}")(x)
        y = layers.MultiHeadAttention(
            heads,
            hidden // heads,
            bias_initializer=zoo.bias(),
            name=f"attention_{index}",
        )(y, y)
        x = layers.Add(name=f"add_a_{index}")([x, y])
        y = layers.LayerNormalization(name=f"norm_b_{index}")(x)
        y = zoo.dense(intermediate, f"up_{index}", activation="gelu")(y)
        y = zoo.dense(hidden, f"down_{index}")(y)
        x = layers.Add(name=f"add_b_{index}")([x, y])
    return keras.Model(inputs, x, name="transformer")


def one_by_one():
    """Whether input gradients of query, key and value are reduced one by one.

    XLA's CPU pipeline does not add them before, as its GPU and TPU pipelines
    do: two more all-reduces for each block.
    """
    on_cpu = distribution.list_devices()[0].startswith("cpu")
    return keras.config.backend() == "jax" and on_cpu


@SHAPES
def test_two_transformer_blocks(shape):
    length, hidden = 6, 20
    layouts = {**PAIRS, **zoo.attention_layouts("attention_.*")}
    with harness.model_parallel(layouts, shape).scope():
        model = transformer(2, length, hidden, heads=4, intermediate=32)
        model.compile("adam", "mse")
    x = np.arange(24, dtype="int32").reshape(BATCH, length)
    y = floats(BATCH, length, hidden)
    activation = BATCH * length * hidden * 4
    # Two forward and two backward for each block.
    count = 12 if one_by_one() else 8
    assert counts(model, x, y) == {"all_reduce": (count, count * activation)}
    assert counts(model, x) == {"all_reduce": (4, 4 * activation)}


@SHAPES
def test_projections_beside_a_residual_connection(shape):
    """As in BERT: the input of queries, keys and values is added to later."""
    length, hidden = 6, 20
    layouts = zoo.attention_layouts("attention")
    with harness.model_parallel(layouts, shape).scope():
        inputs = keras.Input((length,), dtype="int32")
        x = layers.Embedding(24, hidden, name="tokens")(inputs)
        y = layers.MultiHeadAttention(4, 5, name="attention")(x, x)
        model = keras.Model(inputs, layers.Add()([x, y]), name="residual")
        model.compile("sgd", "mse")
    x = np.arange(24, dtype="int32").reshape(BATCH, length)
    count = 4 if one_by_one() else 2
    assert counts(model, x, floats(BATCH, length, hidden)) == {
        "all_reduce": (count, count * BATCH * length * hidden * 4)
    }


def everything(model):
    """Returns all state of a compiled model, and of the random generators."""
    variables = [
        *model.variables,
        *model.optimizer.variables,
        *model.metrics_variables,
    ]
    numpy_state = np.random.get_state()
    return (
        [(v.path, keras.ops.convert_to_numpy(v)) for v in variables],
        numpy_state[1].tolist() + list(numpy_state[2:]),
        random.getstate(),
    )


def assert_same_state(before, after):
    assert before[1:] == after[1:]
    assert [path for path, _ in before[0]] == [path for path, _ in after[0]]
    for (path, old), (_, new) in zip(before[0], after[0]):
        np.testing.assert_array_equal(old, new, path)


def test_counting_changes_nothing():
    case = zoo.CASES["dropout"]
    x, y = harness.data_of(case)
    shape = harness.fitted((2, 2))
    with harness.model_parallel(case.layouts, shape).scope():
        model = harness.build(case)
        model.compile(keras.optimizers.Adam(0.01), case.loss, metrics=["mae"])
    model.train_on_batch(x, y)
    model.train_on_batch(x, y)
    before = everything(model)
    names = {path.split("/")[-1] for path, _ in before[0]}
    assert {"iteration", "seed_generator_state", "total"} <= names
    # The counter of steps and the metrics have something to lose.
    assert all(np.any(v) for p, v in before[0] if p.endswith("/iteration"))
    assert all(np.any(v) for p, v in before[0] if p.endswith("/total"))
    found = counts(model, x, y)
    assert found["all_reduce"][0] > 0
    assert_same_state(before, everything(model))
    counts(model, x)
    assert_same_state(before, everything(model))


@pytest.mark.skipif(
    keras.config.backend() == "torch",
    reason=(
        "building the metrics takes a batch from the data, and torch's loader "
        "draws its seed then: plain Keras has other masks after it too"
    ),
)
def test_counting_first_does_not_change_the_training():
    """Also where it is counting that builds the optimizer and the metrics."""
    case = zoo.CASES["dropout"]
    x, y = harness.data_of(case)

    shape = harness.fitted((1, 2))

    def losses(count_first):
        with harness.model_parallel(case.layouts, shape).scope():
            model = harness.build(case)
            model.compile(
                keras.optimizers.Adam(0.01), case.loss, metrics=["mae"]
            )
        if count_first:
            assert counts(model, x, y)
        # In order: Keras draws one more permutation if `fit` has to build.
        history = model.fit(x, y, epochs=3, shuffle=False, verbose=0)
        return history.history

    assert losses(True) == losses(False)


def test_data_parallel():
    mesh = harness.mesh(harness.fitted((4,)), ["batch"])
    with distribution.DataParallel(device_mesh=mesh).scope():
        model = pairs([(16, 5)], layers.Dense(10, name="first"))
    x, y = floats(BATCH, FEATURES), floats(BATCH, 5)
    gradients = sum(math.prod(v.shape) for v in model.trainable_variables)
    count = len(model.trainable_variables)
    # One for each gradient, and one number for the loss: its mean is over the
    # samples of all devices.
    assert counts(model, x, y) == {
        "all_reduce": (count + 1, 4 * (gradients + 1))
    }
    # Every device computes its own samples.
    assert counts(model, x) == {}


def recurrent(layer, length):
    """The forward pass of a layer whose recurrent kernel is split over rows."""
    layouts = {"recurrent/.*/recurrent_kernel": ("model", None)}
    with harness.model_parallel(layouts, harness.fitted((1, 4))).scope():
        inputs = keras.Input((length, FEATURES))
        x = layer(8, name="recurrent")(inputs)
        model = keras.Model(inputs, x, name="recur")
    return counts(model, floats(BATCH, length, FEATURES))


@pytest.mark.parametrize("length", [5, 9])
def test_a_loop_counts_for_each_of_its_steps(length):
    # A step adds up what the rows of each device contribute to the new state.
    # Keras on torch does the first one twice, to see what its output is like.
    steps = length + (keras.config.backend() == "torch")
    assert recurrent(layers.SimpleRNN, length) == {
        "all_reduce": (steps, steps * BATCH * 8 * 4)
    }


def test_all_that_a_loop_does_counts_for_each_of_its_steps():
    # The same for the four gates; taking them apart may cost more, but that
    # too once for each step.
    short, long = recurrent(layers.LSTM, 5), recurrent(layers.LSTM, 9)
    assert short["all_reduce"] == (5, 5 * BATCH * 4 * 8 * 4)
    assert {name: (n // 5, size // 5) for name, (n, size) in short.items()} == {
        name: (n // 9, size // 9) for name, (n, size) in long.items()
    }
    assert all(n % 5 == 0 and size % 5 == 0 for n, size in short.values())
    assert all(n % 9 == 0 and size % 9 == 0 for n, size in long.values())


EXPERTS = {"experts/kernel": ("model", None, None)}


class Experts(layers.Layer):
    """Experts that all see all tokens, weighted by a router."""

    def __init__(self, normalized):
        super().__init__(name="experts")
        self.normalized = normalized

    def build(self, shape):
        self.router = self.add_weight(shape=(shape[-1], 8), name="router")
        self.kernel = self.add_weight(
            shape=(8, shape[-1], shape[-1]), name="kernel"
        )

    def call(self, x):
        weights = keras.ops.softmax(keras.ops.matmul(x, self.router))
        weights, chosen = keras.ops.top_k(weights, 3)
        if self.normalized:
            weights = weights / keras.ops.sum(weights, -1, keepdims=True)
        one_hot = keras.ops.one_hot(chosen, 8, dtype=weights.dtype)
        weights = keras.ops.sum(one_hot * weights[..., None], axis=1)
        y = keras.ops.einsum("td,edf->etf", x, self.kernel)
        y = y * keras.ops.transpose(weights)[..., None]
        return keras.ops.sum(y, axis=0)


@SHAPES
@pytest.mark.parametrize("normalized", [False, True])
def test_the_gradient_of_a_router(normalized, shape):
    # Three for each token: two would be split on JAX, by 2 devices.
    with harness.model_parallel(EXPERTS, shape).scope():
        inputs = keras.Input((FEATURES,))
        model = keras.Model(inputs, Experts(normalized)(inputs))
        model.compile("sgd", "mse")
    # The output of the experts, and the gradient of the weights of each token.
    found = counts(model, floats(BATCH, FEATURES), floats(BATCH, FEATURES))
    assert found == {"all_reduce": (2, BATCH * (FEATURES + 3) * 4)}
