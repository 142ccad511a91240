"""Optimizer state that is split over the batch axis too: row B.3."""

import functools
import warnings

import keras
import numpy as np
import pytest
from keras import layers

from integration_tests import harness
from integration_tests import zoo
from keras_tp import distribution

BACKEND = keras.config.backend()
BATCH, FEATURES, UNITS = 8, 16, 32
SHAPES = harness.shapes((2, 1), (4, 1), (2, 2))


def network():
    """Every dim of every weight divides by four."""
    keras.utils.set_random_seed(1)
    inputs = keras.Input((FEATURES,))
    x = layers.Dense(UNITS, use_bias=False, activation="relu", name="up")(
        inputs
    )
    x = layers.Dense(FEATURES, use_bias=False, name="down")(x)
    return keras.Model(inputs, x, name="network")


LAYOUTS = {"up/kernel": zoo.COLUMN, "down/kernel": zoo.ROW}
if BACKEND == "torch":
    # One mesh over all processes.
    devices = distribution.get_device_count()
    SHAPES = pytest.mark.parametrize(
        "shape", [(devices, 1)] + [(2, 2)] * (devices == 4)
    )


def data():
    rng = np.random.default_rng(0)
    return (
        rng.standard_normal((BATCH, FEATURES), "float32"),
        rng.standard_normal((BATCH, FEATURES), "float32"),
    )


def parallel(shape, shard_optimizer=True):
    layout_map = distribution.LayoutMap(harness.mesh(shape))
    for pattern, axes in LAYOUTS.items():
        layout_map[pattern] = axes
    return distribution.ModelParallel(
        layout_map=layout_map, shard_optimizer=shard_optimizer
    )


def trained(model, optimizer, steps=5):
    model.compile(optimizer(), "mse")
    losses = [np.ravel(model.train_on_batch(*data()))[0] for _ in range(steps)]
    return losses, harness.weights_of(model)


OPTIMIZERS = {
    "sgd": lambda: keras.optimizers.SGD(0.05, momentum=0.9),
    "adam": lambda: keras.optimizers.Adam(0.01),
    "clipped": lambda: keras.optimizers.SGD(
        0.5, momentum=0.9, global_clipnorm=0.1
    ),
    "decayed": lambda: keras.optimizers.AdamW(0.01, weight_decay=0.1),
}


@functools.cache
def reference(name):
    harness.assert_plain()
    return trained(network(), OPTIMIZERS[name])


def assert_slots_are_split(model, devices):
    rows = distribution.describe(model).rows
    slots = [row for row in rows if row.role == "slot" and row.shape]
    assert slots
    for row in slots:
        held = row.device_bytes
        assert set(held.values()) == {row.bytes // devices}, row
        assert "batch" in row.axes


@SHAPES
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_losses_and_bytes(name, shape):
    want_losses, want = reference(name)
    with parallel(shape).scope():
        model = network()
    losses, got = trained(model, OPTIMIZERS[name])
    assert_slots_are_split(model, shape[0] * shape[1])
    # The variables are not: this is no fully sharded layout.
    split = set() if shape[1] == 1 else {"up/kernel", "down/kernel"}
    assert harness.split_paths(model) == split
    assert want_losses[-1] < 0.99 * want_losses[0]
    np.testing.assert_allclose(losses, want_losses, rtol=1e-5)
    for path, value in want.items():
        np.testing.assert_allclose(got[path], value, atol=1e-5, err_msg=path)


@SHAPES
def test_a_trained_model_is_moved_there_and_back(shape):
    model = network()
    model.compile(keras.optimizers.Adam(0.01), "mse")
    plain = network()
    plain.compile(keras.optimizers.Adam(0.01), "mse")

    def step():
        want = np.ravel(plain.train_on_batch(*data()))[0]
        got = np.ravel(model.train_on_batch(*data()))[0]
        np.testing.assert_allclose(got, want, rtol=1e-5)

    step()
    for shard_optimizer in (True, False, True):
        distribution.distribute_model(model, parallel(shape, shard_optimizer))
        for _ in range(2):
            step()
    assert_slots_are_split(model, shape[0] * shape[1])


@SHAPES
def test_what_is_communicated(shape):
    """Gradients are added up where their slots are; the weights are gathered.

    A reduce-scatter is an all-reduce of which each device keeps its part: on
    TensorFlow, and on JAX where XLA compiles for CPUs.
    """
    with parallel(shape).scope():
        model = network()
    model.compile(keras.optimizers.Adam(0.01), "mse")
    found = distribution.count_collectives(model, *data())
    sent = {name: count for name, (count, _) in found.items() if count}
    # The loss is the mean over the samples of all devices; on a mesh with a
    # model axis there is the output of the pair too.
    others = 1 + (shape[1] > 1)
    if BACKEND == "torch":
        want = {"reduce_scatter": 2, "all_reduce": others, "all_gather": 2}
    else:
        want = {"all_reduce": 2 + others, "all_gather": 2}
    assert sent == want


def assert_fully_sharded(parallel, shape):
    """Trains as on one device; each holds its part of weights and slots."""
    want_losses, want = reference("adam")
    with parallel.scope():
        model = network()
    losses, got = trained(model, OPTIMIZERS["adam"])
    np.testing.assert_allclose(losses, want_losses, rtol=1e-5)
    for path, value in want.items():
        np.testing.assert_allclose(got[path], value, atol=1e-5, err_msg=path)
    assert_slots_are_split(model, shape[0] * shape[1])
    for row in distribution.describe(model).rows:
        if row.role == "weight":
            assert set(row.device_bytes.values()) == {
                row.bytes // (shape[0] * shape[1])
            }
    return model


@SHAPES
def test_fully_sharded(shape):
    """The weights themselves over the batch axis too, as in FSDP (ZeRO-3)."""
    layouts = {
        "up/kernel": ("batch", "model"),
        "down/kernel": ("model", "batch"),
    }
    assert_fully_sharded(harness.model_parallel(layouts, shape), shape)


def steps_network():
    """On sequences, with a normalization between."""
    keras.utils.set_random_seed(1)
    inputs = keras.Input((4, FEATURES))
    x = layers.Dense(UNITS, activation="relu", name="up")(inputs)
    x = layers.LayerNormalization(name="norm")(x)
    x = layers.Dense(UNITS, name="mid")(x)
    x = layers.GlobalAveragePooling1D()(x)
    return keras.Model(inputs, layers.Dense(FEATURES, name="down")(x))


@SHAPES
@pytest.mark.parametrize(
    "axes", [("batch", "model"), ("model", "batch"), ("batch", None)]
)
def test_one_layout_for_all_kernels(axes, shape):
    """The layout of `docs/layouts.md`, which pairs no columns with rows."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((BATCH, 4, FEATURES), "float32")

    def train():
        model = steps_network()
        model.compile(keras.optimizers.Adam(0.01), "mse")
        losses = [model.train_on_batch(x, data()[1]) for _ in range(3)]
        return model, [np.ravel(loss)[0] for loss in losses]

    harness.assert_plain()
    plain, expected = train()
    want = harness.weights_of(plain)
    with harness.model_parallel({".*kernel": axes}, shape).scope():
        model, losses = train()
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    got = harness.weights_of(model)
    for path, value in want.items():
        np.testing.assert_allclose(got[path], value, atol=1e-5, err_msg=path)
    parts = np.prod([shape["batch model".split().index(a)] for a in axes if a])
    for row in distribution.describe(model).rows:
        if row.path.endswith("kernel") and row.role == "weight":
            assert set(row.device_bytes.values()) == {row.bytes // parts}


@SHAPES
def test_a_plan_that_is_fully_sharded(shape):
    plan = distribution.plan_sharding(
        network, harness.mesh(shape), fully_shard="batch"
    )
    assert plan.split_share == 1
    with warnings.catch_warnings():
        # Not "each device holds every variable whole".
        warnings.simplefilter("error")
        plan.distribution()
        distribution.TensorParallel(harness.mesh(shape), fully_shard=True)
    model = assert_fully_sharded(plan.distribution(), shape)
    weights = sum(np.prod(v.shape) * 4 for v in model.trainable_variables)
    memory = plan.memory(BATCH)
    assert memory["parameters"] == weights // (shape[0] * shape[1])
    assert memory["slots"] == 2 * memory["parameters"]


def tokens_network():
    """Two transformer blocks whose dims divide by four."""
    keras.utils.set_random_seed(1)
    tokens = keras.Input((4,), dtype="int32")
    x = layers.Embedding(UNITS, FEATURES, name="tokens")(tokens)
    for i in range(2):
        y = layers.MultiHeadAttention(4, 4, name=f"attention_{i}")(x, x)
        x = layers.LayerNormalization(name=f"norm_{i}")(x + y)
        y = layers.Dense(UNITS, activation="relu", name=f"up_{i}")(x)
        x = x + layers.Dense(FEATURES, name=f"down_{i}")(y)
    return keras.Model(tokens, x)


@SHAPES
def test_a_fully_sharded_plan_predicts_gathers_of_variables(shape):
    plan = distribution.plan_sharding(
        tokens_network, harness.mesh(shape), fully_shard=True
    )
    again = [row.path for row in plan.variables if row.gathered_again]
    # Four kernels of attention and two others in each block.
    assert len(again) == 2 * (4 + 2)
    assert all(path.endswith("kernel") for path in again)
    with plan.distribution().scope():
        model = tokens_network()
    model.compile("adam", "mse")
    x = np.arange(BATCH * 4).reshape(BATCH, 4) % UNITS
    y = np.zeros((BATCH, 4, FEATURES), "float32")
    found = distribution.count_collectives(model, x, y)
    predicted = plan.collectives(BATCH)
    per_device = [
        plan.device_bytes(row)
        for row in plan.variables
        if row.trainable and "batch" in row.axes
    ]
    if BACKEND == "torch":
        # It also gathers the two variables of each norm again. The loss is a
        # number more.
        count, size = predicted["all_gather"]
        norms = 4, 4 * FEATURES * 4
        assert found["all_gather"] == (count + norms[0], size + norms[1])
        assert found["reduce_scatter"] == predicted["reduce_scatter"]
        assert predicted["reduce_scatter"] == (len(per_device), sum(per_device))
        count, size = predicted["all_reduce"]
        assert found["all_reduce"] == (count + 1, size + 4)
    elif BACKEND == "jax":
        # XLA on CPUs has no reduce-scatter, and sums small gradients together.
        assert found["all_gather"] == predicted["all_gather"]
    else:
        # Each variable once: the forward pass keeps what it gathers.
        size = sum(per_device) * shape[0]
        assert found["all_gather"] == (len(per_device), size)


@pytest.mark.parametrize("axis", ["model", "rows"])
def test_an_axis_that_cannot_be_fully_sharded(axis):
    with pytest.raises(ValueError, match="`fully_shard` must be a mesh axis"):
        distribution.plan_sharding(
            network, harness.mesh(harness.fitted((1, 2))), fully_shard=axis
        )
