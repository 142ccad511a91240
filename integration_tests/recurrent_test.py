"""Recurrent layers whose units are split, against one device."""

import keras
import numpy as np
import pytest
from keras import layers

from integration_tests import harness
from keras_tp import distribution

BATCH, LENGTH, FEATURES, UNITS, OUTPUTS = 4, 6, 16, 32, 8
GATES = {"LSTM": 4, "GRU": 3, "SimpleRNN": 1}
# DTensor of TensorFlow has no dims of blocks: gates stay whole there.
HAS_BLOCKS = keras.config.backend() != "tensorflow"


def tokens():
    """Returns a batch of tokens that ends with padding, and targets."""
    rng = np.random.default_rng(3)
    x = rng.integers(1, 24, (BATCH, LENGTH))
    x[0, 4:] = 0
    return x, rng.standard_normal((BATCH, OUTPUTS), "float32")


def both_directions(x):
    layer = layers.LSTM(UNITS, return_sequences=True, name="recurrent")
    x = layers.Bidirectional(layer, name="both")(x)
    return layers.GRU(UNITS, name="last")(x)


def encoder_and_decoder(x):
    _, h, c = layers.LSTM(UNITS, return_state=True, name="encoder")(x)
    return layers.LSTM(UNITS, name="decoder")(x, initial_state=[h, c])


def layer(kind, **kwargs):
    return lambda x: getattr(layers, kind)(UNITS, name="recurrent", **kwargs)(x)


FORMS = {
    **{kind: layer(kind) for kind in GATES},
    "backwards": layer("LSTM", go_backwards=True),
    "no_bias": layer("GRU", use_bias=False),
    "reset_before": layer("GRU", reset_after=False),
    "of_one_gate": layer("LSTM", implementation=1),
    "both_directions": both_directions,
    "encoder_and_decoder": encoder_and_decoder,
}


def build(form):
    keras.utils.set_random_seed(1)
    inputs = keras.Input((LENGTH,), dtype="int32")
    x = layers.Embedding(24, FEATURES, mask_zero=True)(inputs)
    outputs = layers.Dense(OUTPUTS, name="head")(FORMS[form](x))
    model = keras.Model(inputs, outputs)
    model.compile(keras.optimizers.SGD(0.5), "mse")
    return model


def trained(model):
    x, y = tokens()
    losses = [float(model.train_on_batch(x, y)) for _ in range(3)]
    return losses, model.get_weights(), model.predict_on_batch(x)


@pytest.mark.parametrize("form", FORMS)
def test_training(form):
    alone = build(form)
    weights = alone.get_weights()
    losses, expected, outputs = trained(alone)
    # The layers of the next model are named alike.
    keras.utils.clear_session()
    with distribution.TensorParallel(harness.mesh((1, 2))).scope():
        model = build(form)
        model.set_weights(weights)
        found = trained(model)
    np.testing.assert_allclose(found[0], losses, rtol=1e-5)
    np.testing.assert_allclose(found[2], outputs, atol=1e-5)
    for a, b in zip(found[1], expected, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)
    moved = [np.abs(a - b).max() for a, b in zip(weights, expected)]
    assert min(moved) > 1e-4
    is_split = {
        path for path in harness.split_paths(model) if "recurrent_k" in path
    }
    whole = {"reset_before", "of_one_gate"}
    assert bool(is_split) == (
        form == "SimpleRNN" or (HAS_BLOCKS and form not in whole)
    )


@pytest.mark.skipif(not HAS_BLOCKS, reason="gates stay whole")
@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
def test_a_time_step_gathers_the_state_and_nothing_else(kind):
    _, y = tokens()
    x = np.ones((BATCH, LENGTH, FEATURES), "float32")
    with distribution.TensorParallel(harness.mesh((1, 2))).scope():
        inputs = keras.Input((LENGTH, FEATURES))
        outputs = layers.Dense(OUTPUTS, name="head")(FORMS[kind](inputs))
        model = keras.Model(inputs, outputs)
        model.compile("sgd", "mse")
        counted = distribution.count_collectives(model, x, y)
    count, size = counted["all_gather"]
    # In the forward pass, and again for the gradient of the kernel. On torch
    # the first state, of zeros, is whole.
    steps = LENGTH - (keras.config.backend() == "torch")
    assert (count, size) == (2 * steps, 2 * steps * 4 * BATCH * UNITS)
    assert counted["all_to_all"] == counted["collective_permute"] == (0, 0)
