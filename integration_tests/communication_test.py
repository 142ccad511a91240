"""Row B.5: collectives on arrays whose first dim is the devices of an axis."""

import keras
import numpy as np
import pytest

from integration_tests import harness
from integration_tests import zoo
from keras_tp import backend
from keras_tp import distribution

ROWS, FEATURES = 8, 3
SHAPES = harness.shapes((1, 2), (1, 4), (2, 2))


def concatenated(x):
    return keras.ops.reshape(x, (-1, *x.shape[2:]))


def on_each(value, n):
    return keras.ops.stack([value] * n)


# What each does, said in ops of one device.
MEANING = {
    "all_reduce": lambda x, n: on_each(keras.ops.sum(x, 0), n),
    "all_gather": lambda x, n: on_each(concatenated(x), n),
    "reduce_scatter": lambda x, n: keras.ops.stack(
        keras.ops.split(keras.ops.sum(x, 0), n)
    ),
    "broadcast": lambda x, n: on_each(x[1], n),
    "scatter": lambda x, n: keras.ops.stack(keras.ops.split(x[1], n)),
}
ARGUMENTS = {"broadcast": {"source": 1}, "scatter": {"source": 1}}
# What is sent, forward and backward; to broadcast and to scatter is to add up
# with zeros.
SENT = {
    "all_reduce": ("all_reduce", "all_reduce"),
    "all_gather": ("all_gather", "reduce_scatter"),
    "reduce_scatter": ("reduce_scatter", "all_gather"),
    "broadcast": ("all_reduce", "all_reduce"),
    "scatter": ("reduce_scatter", "all_gather"),
}
if keras.config.backend() == "tensorflow":
    # DTensor adds up whole tensors, of which each device keeps its part.
    SENT.update(
        all_gather=("all_gather", "all_reduce"),
        reduce_scatter=("all_reduce", "all_gather"),
        scatter=("all_reduce", "all_gather"),
    )


class Collective(keras.layers.Layer):
    """What a collective makes of a weight, times the input."""

    def __init__(self, name, devices):
        super().__init__(name=name)
        self.devices = devices

    def build(self, shape):
        self.held = self.add_weight(
            shape=(self.devices, ROWS, FEATURES),
            initializer=zoo.bias(),
            name="held",
        )

    def call(self, x):
        current = distribution.distribution()
        if current is None:
            y = MEANING[self.name](
                keras.ops.convert_to_tensor(self.held), self.devices
            )
        else:
            y = getattr(backend.communication, self.name)(
                keras.ops.convert_to_tensor(self.held),
                current.device_mesh,
                "model",
                **ARGUMENTS.get(self.name, {}),
            )
        # Like the weight, the batch comes after the devices.
        return keras.ops.expand_dims(y, 0) * x


def weighted_mean(y, outputs):
    return keras.ops.mean(y * outputs)


def model_of(name, devices):
    keras.utils.set_random_seed(1)
    inputs = keras.Input((1, 1, 1))
    model = keras.Model(inputs, Collective(name, devices)(inputs))
    model.compile(keras.optimizers.SGD(1.0), weighted_mean)
    return model


def distributed(name, shape):
    layouts = {f"{name}/held": ("model", None, None)}
    with harness.model_parallel(layouts, shape).scope():
        return model_of(name, shape[1])


def data(model):
    shape = model.output_shape[1:]
    rng = np.random.default_rng(0)
    batch = 2
    return (
        rng.standard_normal((batch, 1, 1, 1), "float32"),
        rng.standard_normal((batch, *shape), "float32"),
    )


@SHAPES
@pytest.mark.parametrize("name", MEANING)
def test_values_and_gradients(name, shape):
    plain, model = model_of(name, shape[1]), distributed(name, shape)
    x, y = data(plain)
    want, got = plain.predict(x, verbose=0), model.predict(x, verbose=0)
    np.testing.assert_allclose(got, want, atol=1e-6)
    before = harness.weights_of(plain)
    want, got = plain.train_on_batch(x, y), model.train_on_batch(x, y)
    np.testing.assert_allclose(got, want, rtol=1e-5)
    plain, got = harness.weights_of(plain), harness.weights_of(model)
    for path, value in plain.items():
        # The rate is one: the update is the gradient.
        assert np.max(np.abs(value - before[path])) > 1e-3
        np.testing.assert_allclose(got[path], value, atol=1e-6)
    assert harness.split_paths(model) == {f"{name}/held"}


@harness.shapes((1, 2), (1, 4))
@pytest.mark.parametrize("name", ARGUMENTS)
def test_other_devices_may_hold_nan(name, shape):
    source = ARGUMENTS[name]["source"]
    plain, model = model_of(name, shape[1]), distributed(name, shape)
    held = np.array(harness.weights_of(plain)[f"{name}/held"])
    held[np.arange(len(held)) != source] = np.nan
    plain.set_weights([held])
    model.set_weights([held])
    x, _ = data(plain)
    want, got = plain.predict(x, verbose=0), model.predict(x, verbose=0)
    assert np.all(np.isfinite(want))
    np.testing.assert_allclose(got, want, atol=1e-6)


@harness.shapes((1, 2), (1, 4))
@pytest.mark.parametrize("name", MEANING)
def test_what_is_communicated(name, shape):
    """One collective, or, in training, one more for the gradient."""
    model = distributed(name, shape)
    x, y = data(model)
    forward, *backward = SENT[name]
    found = distribution.count_collectives(model, x)
    sent = {name: count for name, (count, _) in found.items() if count}
    assert sent == {forward: 1}
    found = distribution.count_collectives(model, x, y)
    sent = {name: count for name, (count, _) in found.items() if count}
    # The loss is a mean over the devices' parts of the outputs.
    expected = {"all_reduce": 1}
    for one in (forward, *backward):
        expected[one] = expected.get(one, 0) + 1
    assert sent == expected
