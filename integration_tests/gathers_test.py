"""Plans that gather the outputs of layers train as one device does."""

import keras
import numpy as np
import pytest
from keras import layers

from integration_tests import harness
from keras_tp import distribution
from keras_tp.distribution import TensorParallel

BACKEND = keras.config.backend()
LENGTH, WIDTH = 8, 16


class Positions(layers.Layer):
    def build(self, shape):
        self.table = self.add_weight(shape=(2 * LENGTH, WIDTH), name="table")

    def call(self, x):
        return keras.ops.expand_dims(self.table[:LENGTH], 0)


def dense(x):
    x = layers.Dense(32, activation="relu", name="wide")(x)
    return layers.LayerNormalization(name="norm")(x)


def called_twice(x):
    square = layers.Dense(WIDTH, activation="tanh", name="square")
    for k in range(2):
        x = layers.LayerNormalization(name=f"norm_{k}")(square(x))
    return x


def einsum(x):
    x = layers.EinsumDense(
        "abc,cde->abde", (LENGTH, 4, 8), bias_axes="de", name="heads"
    )(x)
    return layers.LayerNormalization(axis=(-2, -1), name="norm")(x)


def convolution(x):
    x = layers.Conv1D(32, 3, padding="same", name="conv")(x)
    return layers.LayerNormalization(name="norm")(x)


def positions(x):
    x = x + Positions(name="positions")(x)
    return layers.LayerNormalization(name="norm")(x)


def one_key_head(x):
    """The gradients of keys and values are sums over the query heads."""
    x = layers.GroupQueryAttention(4, 4, 1, flash_attention=False, name="gqa")(
        x, x
    )
    return layers.LayerNormalization(name="norm")(x)


# Model -> layers whose output is gathered.
MODELS = {
    dense: ["wide"],
    called_twice: ["square", "square"],
    einsum: ["heads"],
    convolution: ["conv"],
    positions: ["positions"],
    one_key_head: ["gqa/key", "gqa/value"],
}


def build(body):
    inputs = keras.Input((LENGTH, WIDTH))
    return keras.Model(inputs, body(inputs), name="gathering")


def trained(body):
    """Returns a model after three steps, its losses and data."""
    keras.utils.set_random_seed(4)
    model = build(body)
    rng = np.random.default_rng(2)
    x = rng.normal(size=(8, LENGTH, WIDTH)).astype("float32")
    y = rng.normal(size=(8, *model.output_shape[1:])).astype("float32")
    model.compile(keras.optimizers.SGD(0.1), "mse")
    history = model.fit(x, y, batch_size=8, epochs=3, shuffle=False, verbose=0)
    return model, history.history["loss"], (x, y)


@harness.shapes((1, 2), (2, 2))
@pytest.mark.parametrize("body", MODELS)
def test_training(body, shape):
    reference, losses, _ = trained(body)
    keras.utils.clear_session()
    plan = distribution.plan_sharding(
        lambda: build(body), harness.mesh(shape), gather_outputs=0
    )
    gathered = [row.path for row in plan.gathers]
    assert set(MODELS[body]) <= set(gathered)
    with TensorParallel(plan=plan, strict=True).scope():
        model, found, (x, y) = trained(body)
    assert harness.split_paths(model) == {
        row.path for row in plan.variables if row.is_split
    }
    np.testing.assert_allclose(found, losses, rtol=1e-5)
    for ours, theirs in zip(model.weights, reference.weights, strict=True):
        a, b = (keras.ops.convert_to_numpy(v) for v in (ours, theirs))
        assert harness.difference(a, b) < 1e-5, ours.path
    predicted = plan.collectives(8)
    counted = distribution.count_collectives(model, x, y)
    counted = {kind: pair for kind, pair in counted.items() if pair[0]}
    assert counted["all_gather"] == predicted["all_gather"]
    if BACKEND == "torch":
        # Others combine gradients, or sum and split in two operations.
        assert counted == {k: v for k, v in predicted.items() if v[0]}


def test_a_model_that_is_planned_when_it_is_used():
    """Of its kernel, as large as it has to be by default."""

    def large():
        inputs = keras.Input((2048,))
        x = layers.Dense(2048, name="large")(inputs)
        return keras.Model(inputs, layers.LayerNormalization(name="norm")(x))

    x = np.random.default_rng(0).normal(size=(2, 2048)).astype("float32")
    keras.utils.set_random_seed(1)
    expected = large().predict(x, verbose=0)
    keras.utils.set_random_seed(1)
    mesh = harness.mesh(harness.fitted((1, 2)))
    with TensorParallel(mesh, strict=True).scope():
        model = large()
    found = model.predict(x, verbose=0)
    np.testing.assert_allclose(found, expected, atol=1e-5)
    assert "large/kernel" in harness.split_paths(model)
    counted = distribution.count_collectives(model, x)
    assert counted["all_gather"] == (1, 2 * 2048 * 4)
