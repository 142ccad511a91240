"""`sequence_parallel=True` splits activations along the sequence.

The collectives are those of the plan, and none is an all-reduce of an
activation: Korthikanti et al. 2022 (arXiv 2205.05198), section 4.2.2.
"""

import keras
import numpy as np
import pytest

from integration_tests import harness
from keras_tp import distribution

BATCH, LENGTH, WIDTH, HEADS, WORDS = 4, 16, 32, 4, 64
RNG = np.random.default_rng(0)
TOKENS = RNG.integers(0, WORDS, (BATCH, LENGTH)).astype("int32")
TARGETS = RNG.normal(size=(BATCH, LENGTH, WIDTH)).astype("float32")
ACTIVATION = TARGETS.nbytes


def blocks(length=LENGTH, dropout=0.0, embedding=True):
    """Returns two transformer blocks, behind an embedding if there is one."""
    layers = keras.layers
    if embedding:
        inputs = keras.Input((length,), dtype="int32")
        x = layers.Embedding(WORDS, WIDTH, name="lookup")(inputs)
    else:
        inputs = keras.Input((length, WIDTH))
        x = layers.Conv1D(WIDTH, 1, name="patches")(inputs)
    for i in range(2):
        y = layers.LayerNormalization(name=f"before_attention_{i}")(x)
        attention = layers.MultiHeadAttention(
            HEADS, WIDTH // HEADS, name=f"attention_{i}"
        )
        y = attention(y, y)
        x = x + (layers.Dropout(dropout, seed=i)(y) if dropout else y)
        y = layers.LayerNormalization(name=f"before_up_{i}")(x)
        y = layers.Dense(4 * WIDTH, activation="gelu", name=f"up_{i}")(y)
        x = x + layers.Dense(WIDTH, name=f"down_{i}")(y)
    return keras.Model(inputs, x)


def language_model():
    """Returns a model whose head is the table of its embedding."""
    inputs = keras.Input((LENGTH,), dtype="int32")
    table = keras.layers.ReversibleEmbedding(WORDS, WIDTH, name="table")
    x = table(inputs)
    y = keras.layers.LayerNormalization(name="before")(x)
    y = keras.layers.Dense(2 * WIDTH, activation="gelu", name="up")(y)
    x = x + keras.layers.Dense(WIDTH, name="down")(y)
    x = keras.layers.LayerNormalization(name="last")(x)
    return keras.Model(inputs, table(x, reverse=True))


def train(build, targets=TARGETS, tokens=TOKENS, loss="mse", optimizer="sgd"):
    """Returns a model that was trained for three steps, and its losses."""
    keras.utils.clear_session()
    keras.utils.set_random_seed(1)
    model = build()
    if optimizer == "sgd":
        optimizer = keras.optimizers.SGD(0.1)
    model.compile(optimizer, loss)
    losses = [model.train_on_batch(tokens, targets) for _ in range(3)]
    return model, losses


def parallel(shape, **kwargs):
    return distribution.TensorParallel(
        harness.mesh(shape), sequence_parallel=True, **kwargs
    )


def counted(model, targets):
    found = distribution.count_collectives(model, TOKENS, targets)
    return {kind: pair for kind, pair in found.items() if pair[0]}


@harness.shapes((1, 2), (1, 4))
def test_two_blocks(shape):
    _, expected = train(blocks)
    with parallel(shape).scope():
        model, losses = train(blocks)
        found = counted(model, TARGETS)
        plan = distribution.distribution().plan
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    assert losses != expected, "nothing was split"
    count = shape[1]
    # Four in each pass of two blocks, and one of the embedding.
    assert found["all_gather"] == (9, 9 * ACTIVATION)
    assert found["reduce_scatter"] == (9, 9 * ACTIVATION // count)
    planned = plan.collectives(BATCH)
    for kind in ("all_gather", "reduce_scatter"):
        assert found[kind] == planned[kind]
    number, size = planned["all_reduce"]
    # The loss may be one more, of a number.
    assert found["all_reduce"] in ((number, size), (number + 1, size + 4))
    assert size < ACTIVATION


@harness.shapes((1, 4))
def test_blocks_without_an_embedding(shape):
    # What the first block adds to is whole, and so is its attention, which
    # kernels of GPUs cannot split along the sequence.
    args = lambda: blocks(embedding=False), TARGETS, TARGETS
    _, expected = train(*args)
    with parallel(shape).scope():
        model, losses = train(*args)
        found = distribution.count_collectives(model, TARGETS, TARGETS)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    assert found["all_to_all"][0] == 0
    # Of the second block, and of the first one's feed-forward network.
    assert found["reduce_scatter"][0] >= 6


def test_a_tied_head():
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    args = language_model, TOKENS, TOKENS, loss
    _, expected = train(*args)
    shape = harness.fitted((1, 4))
    with parallel(shape).scope():
        model, losses = train(*args)
        found = counted(model, TOKENS)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    # The table is read twice: a lookup, and the product of the head.
    assert found["all_gather"] == (4, 4 * ACTIVATION)
    assert found["reduce_scatter"] == (4, 4 * ACTIVATION // shape[1])


@harness.shapes((2, 2))
@pytest.mark.parametrize("fully_shard", [False, True])
def test_two_axes(shape, fully_shard):
    # Plain Keras on TensorFlow changes slots only for words that it looks up.
    optimizer = "sgd" if keras.config.backend() == "tensorflow" else "adam"
    _, expected = train(blocks, optimizer=optimizer)
    with parallel(shape, fully_shard=fully_shard).scope():
        model, losses = train(blocks, optimizer=optimizer)
        report = distribution.describe(model)
        found = counted(model, TARGETS)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    parts = shape[1] * (shape[0] if fully_shard else 1)
    for row in report.rows:
        # Of its matrices, and of their slots.
        if len(row.shape) > 1:
            assert set(row.device_bytes.values()) == {row.bytes // parts}
    # At least the activations are reduce-scattered.
    assert found["reduce_scatter"][0] >= 9


def test_dropout_is_that_of_one_device():
    _, expected = train(lambda: blocks(dropout=0.3))
    with parallel(harness.fitted((1, 4))).scope():
        _, losses = train(lambda: blocks(dropout=0.3))
    np.testing.assert_allclose(losses, expected, rtol=1e-5)


def test_a_length_that_does_not_divide():
    args = lambda: blocks(None), TARGETS[:, :15], TOKENS[:, :15]
    _, expected = train(*args)
    with parallel(harness.fitted((1, 4))).scope():
        with pytest.warns(UserWarning, match="15 positions does not divide"):
            _, losses = train(*args)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)


def test_predictions_and_another_batch_size():
    model, _ = train(blocks)
    expected = model.predict(TOKENS[:3], verbose=0)
    with parallel(harness.fitted((1, 4))).scope():
        model, _ = train(blocks)
        found = model.predict(TOKENS[:3], verbose=0)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)


@harness.shapes((2, 2))
def test_a_batch_that_the_replicas_do_not_divide(shape):
    args = blocks, TARGETS[:3], TOKENS[:3]
    model, expected = train(*args)
    outputs = model.predict(TOKENS[:3], verbose=0)
    with parallel(shape, fully_shard=True).scope():
        model, losses = train(*args)
        found = model.predict(TOKENS[:3], verbose=0)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    np.testing.assert_allclose(found, outputs, rtol=0, atol=1e-5)


def test_a_plan_is_read_from_a_file(tmp_path):
    mesh = harness.mesh(harness.fitted((1, 4)))
    plan = distribution.plan_sharding(blocks, mesh, sequence_parallel=True)
    again = distribution.ShardingPlan.from_json(plan.to_json(), mesh)
    assert again.to_json() == plan.to_json()
    assert again.collectives(BATCH) == plan.collectives(BATCH)
    assert "gathered along the sequence" in plan.summary()


def test_a_model_that_exists():
    model, expected = train(blocks)
    expected.append(model.train_on_batch(TOKENS, TARGETS))
    model, losses = train(blocks)
    scope = parallel(harness.fitted((1, 4)))
    distribution.distribute_model(model, scope)
    with scope.scope():
        losses.append(model.train_on_batch(TOKENS, TARGETS))
        found = counted(model, TARGETS)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    assert found["reduce_scatter"][0] == 9


class Subclassed(keras.Model):
    """A model of the user's own, which its first call builds."""

    def __init__(self):
        super().__init__()
        self.lookup = keras.layers.Embedding(WORDS, WIDTH)
        self.norm = keras.layers.LayerNormalization()
        self.up = keras.layers.Dense(4 * WIDTH, activation="gelu")
        self.down = keras.layers.Dense(WIDTH)

    def call(self, tokens):
        x = self.lookup(tokens)
        return x + self.down(self.up(self.norm(x)))


def sequential():
    """Returns a model without an `Input`."""
    return keras.Sequential(
        [
            keras.layers.Embedding(WORDS, WIDTH),
            keras.layers.LayerNormalization(),
            keras.layers.Dense(4 * WIDTH, activation="gelu"),
            keras.layers.Dense(WIDTH),
        ]
    )


@pytest.mark.parametrize("build", [Subclassed, sequential])
def test_a_model_that_data_builds(build):
    model, expected = train(build)
    expected.append(model.train_on_batch(TOKENS, TARGETS))
    with parallel(harness.fitted((1, 2))).scope():
        model, losses = train(build)
        found = counted(model, TARGETS)
    # After the scope.
    losses.append(model.train_on_batch(TOKENS, TARGETS))
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    assert found["all_gather"][0] == found["reduce_scatter"][0] == 3
    output = keras.ops.convert_to_numpy(model(TOKENS))
    assert output.shape == TARGETS.shape


def test_nothing_to_split_is_said():
    def images():
        inputs = keras.Input((8, 8, 3))
        x = keras.layers.Conv2D(16, 3, padding="same")(inputs)
        return keras.Model(inputs, keras.layers.Conv2D(8, 3)(x))

    mesh = harness.mesh(harness.fitted((1, 4)))
    with pytest.warns(UserWarning, match="sequence_parallel"):
        distribution.plan_sharding(images, mesh, sequence_parallel=True)


def test_an_option_of_a_plan_that_exists():
    mesh = harness.mesh(harness.fitted((1, 4)))
    plan = distribution.plan_sharding(blocks, mesh)
    with pytest.raises(ValueError, match="sequence_parallel=True"):
        distribution.TensorParallel(plan=plan, sequence_parallel=True)
