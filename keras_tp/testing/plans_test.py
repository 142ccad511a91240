"""Planned models: their numbers, their bytes, and what they send."""

import keras
import numpy as np
import pytest
from keras import layers

from keras_tp import backend
from keras_tp import distribution
from keras_tp.testing import models

LENGTH, WIDTH, HEADS = 8, models.WIDTH, models.HEADS
# Bytes of the smallest activation that two layers send.
ACTIVATION = 4 * models.BATCH * models.LENGTH * WIDTH


def _sequences():
    rng = np.random.default_rng(0)
    shape = models.BATCH, LENGTH, WIDTH
    return rng.standard_normal(shape, "float32")


def _around(layer):
    """Returns a model with a normalization before a layer of two inputs."""
    inputs = keras.Input((LENGTH, WIDTH))
    x = layers.LayerNormalization()(inputs)
    return keras.Model(inputs, inputs + layer(x, x))


def grouped():
    """Fewer KV heads than devices."""
    return _around(layers.GroupQueryAttention(WIDTH // HEADS, HEADS, 1))


def repeated():
    """KV heads that the devices do not divide; twice as many they do."""
    heads = 3 * len(distribution.list_devices())
    return _around(
        layers.GroupQueryAttention(WIDTH // HEADS, heads, heads // 2)
    )


def attention():
    return _around(layers.MultiHeadAttention(HEADS, WIDTH // HEADS))


class Fused(layers.Layer):
    """Attention with one kernel for queries, keys and values."""

    def __init__(self):
        super().__init__()
        self.qkv = layers.Dense(3 * WIDTH, use_bias=False, name="qkv")
        self.out = layers.Dense(WIDTH, name="out")

    def build(self, shape):
        self.qkv.build(shape)
        self.out.build(shape)

    def call(self, x):
        def heads(y):
            y = keras.ops.reshape(y, (-1, LENGTH, HEADS, WIDTH // HEADS))
            return keras.ops.transpose(y, (0, 2, 1, 3))

        q, k, v = map(heads, keras.ops.split(self.qkv(x), 3, -1))
        scores = keras.ops.matmul(q, keras.ops.transpose(k, (0, 1, 3, 2)))
        y = keras.ops.matmul(keras.ops.softmax(scores), v)
        y = keras.ops.transpose(y, (0, 2, 1, 3))
        return self.out(keras.ops.reshape(y, (-1, LENGTH, WIDTH)))


def fused():
    inputs = keras.Input((LENGTH, WIDTH))
    x = layers.LayerNormalization()(inputs)
    return keras.Model(inputs, inputs + Fused()(x))


def recurrent(layer=layers.LSTM):
    inputs = keras.Input((LENGTH, WIDTH))
    x = layer(2 * WIDTH, return_sequences=True)(inputs)
    return keras.Model(inputs, layers.Dense(WIDTH)(x))


def tied():
    """The head is the table of the embedding."""
    inputs = keras.Input((models.LENGTH,), dtype="int32")
    table = layers.ReversibleEmbedding(models.WORDS, WIDTH, name="table")
    x = table(inputs)
    y = layers.Dense(4 * WIDTH, activation="gelu")(
        layers.LayerNormalization()(x)
    )
    x = x + layers.Dense(WIDTH)(y)
    return keras.Model(inputs, table(x, reverse=True))


def pooled():
    """Convolutions with pooling between them."""
    inputs = keras.Input((8, 8, 4))
    x = layers.Conv2D(4 * WIDTH, 3, padding="same", activation="relu")(inputs)
    x = layers.MaxPooling2D()(x)
    return keras.Model(inputs, layers.Conv2D(4, 1)(x))


def in_groups():
    """Convolutions whose channels are in groups."""
    inputs = keras.Input((8, 8, 4))
    x = layers.Conv2D(4 * WIDTH, 3, padding="same", groups=4)(inputs)
    x = layers.DepthwiseConv2D(3, padding="same", activation="tanh")(x)
    return keras.Model(inputs, layers.Conv2D(4, 1)(x))


def case(build, like=None):
    """Returns a `Case` with the data of another one."""
    x = _sequences()
    like = like or models.Case(None, x, x, {}, False)
    return like._replace(build=build)


CASES = {
    "pair": models.CASES["pair"],
    "transformer": models.CASES["transformer"],
    "attention": case(attention),
    "grouped": case(grouped),
    "repeated": case(repeated),
    "fused": case(fused),
    "recurrent": case(recurrent),
    "gru": case(lambda: recurrent(layers.GRU)),
    "tied": case(tied, models.CASES["transformer"]),
    "pooled": case(
        pooled,
        models.CASES["images"]._replace(
            y=models.CASES["images"].y[:, ::2, ::2]
        ),
    ),
    "in_groups": case(in_groups, models.CASES["images"]),
}

# Their kernels have several blocks in one dim.
BLOCKS = "fused", "recurrent", "gru"
SPLITS_BLOCKS = backend.distribution_lib.splits_in_blocks()


def held(model):
    """Returns the most bytes of weights that a device holds."""
    rows = distribution.describe(model).rows
    return sum(
        max(row.device_bytes.values()) for row in rows if row.role == "weight"
    )


def sgd(case, parallel=None):
    """Returns a model that was trained by SGD, its losses, and its weights."""
    keras.utils.set_random_seed(1)
    keras.utils.clear_session()
    model = case.build()
    model.compile(keras.optimizers.SGD(0.1), "mse")
    losses = [model.train_on_batch(case.x, case.y) for _ in range(3)]
    return model, losses, models.values(model)


@pytest.mark.parametrize("name", CASES)
def test_training(name):
    one = CASES[name]
    plan = distribution.plan_sharding(one.build, models.mesh())
    _, losses, weights = sgd(one)
    with plan.distribution().scope():
        model, found, values = sgd(one)
    models.assert_close(found, losses)
    models.assert_close(values, weights)
    if name in BLOCKS and not SPLITS_BLOCKS:
        # These stay whole, and the rest is planned anew.
        return
    planned = {row.path for row in plan.variables if row.is_split}
    assert planned and models.split(model) == planned
    assert plan.memory(models.BATCH)["parameters"] == held(model)


@pytest.mark.parametrize(
    "name",
    ["pair", "attention", "grouped", "pooled", "in_groups"],
)
def test_training_on_two_axes(name):
    count = len(distribution.list_devices())
    one = CASES[name]
    _, losses, weights = sgd(one)
    # One of them has a single device on a machine of two.
    with distribution.TensorParallel(models.mesh(batch=count // 2)).scope():
        _, found, values = sgd(one)
    models.assert_close(found, losses)
    models.assert_close(values, weights)


def counted(one):
    """Returns a plan, its model, and the collectives of a step."""
    plan = distribution.plan_sharding(one.build, models.mesh())
    with plan.distribution().scope():
        model = one.build()
        model.compile("sgd", "mse")
    return plan, model, distribution.count_collectives(model, one.x, one.y)


@pytest.mark.parametrize("name", ["transformer", "attention", "fused", "tied"])
def test_what_is_counted_is_what_the_plan_predicts(name):
    if name in BLOCKS and not SPLITS_BLOCKS:
        pytest.skip("declared: blocks of a dim stay whole")
    plan, _, found = counted(CASES[name])
    for kind, (count, size) in plan.collectives(models.BATCH).items():
        number, sent = found[kind]
        # The loss may take one sum more, of fewer bytes than an activation.
        loss = kind == "all_reduce"
        assert count <= number <= count + loss, kind
        assert size <= sent < size + (ACTIVATION if loss else 1), kind


@pytest.mark.parametrize("name", ["attention", "grouped", "repeated", "tied"])
def test_nothing_is_gathered_that_the_plan_does_not_gather(name):
    plan, _, found = counted(CASES[name])
    predicted = plan.collectives(models.BATCH)
    for kind in found.keys() - {"all_reduce"}:
        expected = predicted.get(kind, (0, 0))
        assert tuple(found[kind]) == tuple(expected), kind


@pytest.mark.parametrize("name", ["recurrent", "gru"])
def test_a_time_step_gathers_no_kernel(name):
    if not SPLITS_BLOCKS:
        pytest.skip("declared: blocks of a dim stay whole")
    _, model, found = counted(CASES[name])
    # Its kernels are split, so a gather of them would be needed to use them.
    assert any("_cell/recurrent_kernel" in p for p in models.split(model))
    # The state, in the forward pass, and again for the gradient of the kernel.
    state = 4 * models.BATCH * 2 * WIDTH
    assert found["all_gather"].bytes <= 2 * LENGTH * state
    for kind in ("all_to_all", "collective_permute"):
        assert not found[kind].count, kind


def sequences():
    """Two blocks; what is between them is split along the sequence."""
    inputs = keras.Input((models.LENGTH,), dtype="int32")
    x = layers.Embedding(models.WORDS, WIDTH)(inputs)
    for _ in range(2):
        y = layers.LayerNormalization()(x)
        x = x + layers.MultiHeadAttention(HEADS, WIDTH // HEADS)(y, y)
        y = layers.Dense(4 * WIDTH, "gelu")(layers.LayerNormalization()(x))
        x = x + layers.Dense(WIDTH)(y)
    return keras.Model(inputs, x)


def test_activations_split_along_the_sequence():
    x = models.CASES["transformer"].x
    y = _sequences()[:, : models.LENGTH]
    one = models.Case(sequences, x, y, {}, False)
    _, losses, weights = sgd(one)
    mesh = models.mesh()
    parallel = distribution.TensorParallel(mesh, sequence_parallel=True)
    with parallel.scope():
        model, found, values = sgd(one)
        counted = distribution.count_collectives(model, x, y)
    models.assert_close(found, losses)
    models.assert_close(values, weights)
    predicted = parallel.plan.collectives(models.BATCH)
    for kind in ("all_gather", "reduce_scatter"):
        assert tuple(counted[kind]) == tuple(predicted[kind]), kind
    # No activation is summed and kept whole.
    assert counted["all_reduce"].bytes < y.nbytes


def test_variables_split_over_the_batch_axis():
    one = CASES["attention"]
    count = len(distribution.list_devices())
    _, losses, weights = sgd(one)
    parallel = distribution.TensorParallel(
        models.mesh(batch=count), fully_shard=True
    )
    with parallel.scope():
        model, found, values = sgd(one)
    models.assert_close(found, losses)
    models.assert_close(values, weights)
    for row in distribution.describe(model).rows:
        if len(row.shape) > 1:
            held = {row.bytes // count}
            assert set(row.device_bytes.values()) == held, row.path


def test_a_stored_plan_is_the_plan():
    build = CASES["transformer"].build
    plan = distribution.plan_sharding(build, models.mesh())
    text = plan.to_json()
    assert distribution.ShardingPlan.from_json(text).to_json() == text


def test_a_plan_leaves_no_trace():
    build = CASES["transformer"].build
    first = [v.path for v in build().variables]
    keras.utils.clear_session()
    distribution.plan_sharding(build, models.mesh())
    assert [v.path for v in build().variables] == first
