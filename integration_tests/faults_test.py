"""`verify` finds a fault that is planted, and names its layer.

The layers are written by hand, in parts with a leading device dim and real
collectives between them. A fault is planted in this process; the child that
trains the reference imports the module without any.
"""

import functools

import keras
import numpy as np
import pytest
from keras import layers
from keras import ops

from integration_tests import harness
from integration_tests import zoo
from keras_tp import backend
from keras_tp import distribution as dist
from keras_tp.distribution import verification

BATCH, FEATURES, UNITS, VOCABULARY = 6, 16, 24, 8
SHAPES = harness.shapes((1, 2), (1, 4))

# The one that is planted, and where it has to be found.
planted = None
FAULTS = {
    "an all-reduce is dropped": ("pair", "forward pass"),
    "an all-reduce too many": ("pair", "forward pass"),
    "each device adds the bias": ("pair", "forward pass"),
    "the parts of a kernel are in another order": ("pair", "forward pass"),
    "the parts of a kernel are swapped at first": ("pair", "initial values"),
    # The last layer that learns from a wrong gradient.
    "the all-reduce of a gradient is dropped": ("first", "first update"),
    "parts are gathered in another order": ("gathered", "forward pass"),
    "a device has the part of its neighbour": ("scattered", "forward pass"),
    "a vocabulary begins one too late": ("tokens", "forward pass"),
    "statistics of a part only": ("norm", "forward pass"),
    "an update is lost": ("head", "first update"),
    "a buffer is not updated": ("norm", "first update"),
}


def is_planted(fault):
    assert fault in FAULTS
    return planted == fault and dist.distribution() is not None


def communicate(name, x):
    """A collective over the devices, which are the first dim."""
    current = dist.distribution()
    if current is not None:
        return getattr(backend.communication, name)(
            x, current.device_mesh, "model"
        )
    n = x.shape[0]
    if name == "all_reduce":
        return ops.stack([ops.sum(x, 0)] * n)
    if name == "all_gather":
        return ops.stack([ops.reshape(x, (-1, *x.shape[2:]))] * n)
    return ops.stack(ops.split(ops.sum(x, 0), n))


def shared(x):
    """What all devices have."""
    return ops.mean(x, axis=0)


def whole(array):
    """A constant that each device of the mesh has."""
    mesh = dist.distribution().device_mesh
    layout = dist.TensorLayout([None] * array.ndim, mesh)
    return dist.distribute_tensor(ops.convert_to_tensor(array), layout)


def next_of(x):
    """Each device has what its neighbour should have."""
    order = np.roll(np.eye(x.shape[0], dtype="float32"), 1, axis=0)
    return ops.einsum("mn,nij->mij", whole(order), x)


class ByHand(layers.Layer):
    def __init__(self, devices, name):
        super().__init__(name=name)
        self.devices = devices

    def weight(self, name, *shape):
        return self.add_weight(
            shape=(self.devices, *shape),
            initializer=keras.initializers.RandomUniform(-0.5, 0.5),
            name=name,
        )


class Pair(ByHand):
    def build(self, shape):
        units = UNITS // self.devices
        self.up = self.weight("up", FEATURES, units)
        self.down = self.weight("down", units, FEATURES)
        self.bias = self.add_weight(
            shape=(FEATURES,), initializer=zoo.bias(), name="bias"
        )

    def call(self, x):
        up = ops.convert_to_tensor(self.up)
        if is_planted("the parts of a kernel are in another order"):
            up = next_of(up)
        if is_planted("the all-reduce of a gradient is dropped"):
            # What all but the first device find of it is not added.
            first = np.arange(self.devices).reshape(-1, 1, 1) == 0
            first = whole(first.astype("float32"))
            parts = ops.einsum("bf,nfu->nbu", x, up * first)
            x = ops.stop_gradient(x)
            parts = parts + ops.einsum("bf,nfu->nbu", x, up * (1 - first))
        else:
            parts = ops.einsum("bf,nfu->nbu", x, up)
        y = ops.einsum("nbu,nuf->nbf", ops.relu(parts), self.down)
        if is_planted("each device adds the bias"):
            y = y + self.bias
        if not is_planted("an all-reduce is dropped"):
            y = communicate("all_reduce", y)
        if is_planted("an all-reduce too many"):
            y = communicate("all_reduce", y)
        if is_planted("each device adds the bias"):
            return shared(y)
        return shared(y) + self.bias


class Tokens(ByHand):
    """An embedding that is split over its vocabulary."""

    def build(self, shape):
        self.table = self.weight("table", VOCABULARY // self.devices, FEATURES)

    def call(self, tokens):
        size = VOCABULARY // self.devices
        late = int(is_planted("a vocabulary begins one too late"))
        own = np.arange(VOCABULARY).reshape(self.devices, 1, size) + late
        # One where a device holds the token, else zero.
        found = ops.cast(ops.equal(ops.expand_dims(tokens, -1), own), "float32")
        y = ops.einsum("nbv,nvf->nbf", found, self.table)
        return shared(communicate("all_reduce", y))


class Gathered(ByHand):
    def build(self, shape):
        self.kernel = self.weight("kernel", FEATURES, UNITS // self.devices)

    def call(self, x):
        parts = ops.einsum("bf,nfu->nub", x, self.kernel)
        if is_planted("parts are gathered in another order"):
            parts = next_of(parts)
        return ops.transpose(shared(communicate("all_gather", parts)))


class Scattered(ByHand):
    def build(self, shape):
        self.kernel = self.weight("kernel", UNITS // self.devices, FEATURES)

    def call(self, x):
        x = ops.reshape(x, (-1, self.devices, UNITS // self.devices))
        parts = ops.einsum("bnu,nuf->nfb", x, self.kernel)
        y = communicate("reduce_scatter", parts)
        if is_planted("a device has the part of its neighbour"):
            y = next_of(y)
        y = communicate("all_gather", y)
        return ops.transpose(shared(y))


class Norm(ByHand):
    """A normalization of features of which each device has a part."""

    def build(self, shape):
        self.scale = self.weight("scale", FEATURES // self.devices)
        self.seen = self.add_weight(
            shape=(), initializer="zeros", trainable=False, name="seen"
        )

    def call(self, x, training=False):
        x = ops.reshape(x, (-1, self.devices, FEATURES // self.devices))
        sums = ops.einsum("bnf,nf->nb", ops.square(x), self.scale * 0 + 1)
        if is_planted("statistics of a part only"):
            sums = sums * self.devices
        else:
            sums = communicate("all_reduce", sums)
        rate = ops.rsqrt(sums / FEATURES + 1e-3)
        y = ops.einsum("bnf,nf,nb->bnf", x, self.scale, rate)
        if training and not is_planted("a buffer is not updated"):
            self.seen.assign(0.9 * self.seen + 0.1 * ops.mean(rate))
        return ops.reshape(y, (-1, FEATURES))


class Head(layers.Dense):
    def call(self, x):
        kernel = ops.convert_to_tensor(self.kernel)
        if is_planted("an update is lost"):
            kernel = ops.stop_gradient(kernel)
        return ops.matmul(x, kernel) + self.bias


LAYOUTS = {
    "(pair|tokens|gathered|scattered)/(up|down|table|kernel)": (
        "model",
        None,
        None,
    ),
    "norm/scale": ("model", None),
}


def build(devices, optimizer):
    tokens = keras.Input(batch_shape=(BATCH,), dtype="int32", name="ids")
    x = Tokens(devices, "tokens")(tokens)
    x = zoo.dense(FEATURES, "first", activation="tanh")(x)
    x = Pair(devices, "pair")(x)
    x = Gathered(devices, "gathered")(x)
    x = Scattered(devices, "scattered")(x)
    x = Norm(devices, "norm")(x)
    model = keras.Model(tokens, Head(5, name="head")(x), name="by_hand")
    model.compile(optimizer, "mse")
    if is_planted("the parts of a kernel are swapped at first"):
        kernel = keras.ops.convert_to_numpy(model.get_layer("pair").up)
        model.get_layer("pair").up.assign(np.roll(kernel, 1, axis=0))
    return model


def data():
    rng = np.random.default_rng(0)
    # The tokens at the borders of the parts are among them.
    return (
        np.array([0, 1, 3, 4, 6, 7], "int32"),
        rng.standard_normal((BATCH, 5), "float32"),
    )


def verified(shape, optimizer="sgd"):
    """The report of `verify`; the reference of each kind is trained once."""
    return dist.verify(
        functools.partial(build, shape[1], optimizer),
        harness.model_parallel(LAYOUTS, shape),
        *data(),
        steps=2,
    )


@pytest.fixture(autouse=True)
def one_reference(monkeypatch):
    """A child is started for the first of equal calls only."""
    train = verification._train_reference

    def train_once(build_fn, *arguments):
        key = build_fn.args, arguments[2:]
        if key not in _references:
            _references[key] = train(build_fn, *arguments)
        return _references[key]

    monkeypatch.setattr(verification, "_train_reference", train_once)
    monkeypatch.setattr("integration_tests.faults_test.planted", None)


_references = {}


@SHAPES
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_nothing_is_found_where_nothing_is_wrong(optimizer, shape):
    report = verified(shape, optimizer)
    assert report.passed, report
    assert report.weight_difference > 0


@SHAPES
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault, shape, monkeypatch):
    monkeypatch.setattr("integration_tests.faults_test.planted", fault)
    report = verified(shape)
    assert not report.passed, report
    assert (report.layer, report.where) == FAULTS[fault], report


@pytest.mark.parametrize(
    "fault", ["an update is lost", "the all-reduce of a gradient is dropped"]
)
def test_a_wrong_update_is_found_under_adam(fault, monkeypatch):
    """Its first step has the size of the rate, however large the gradient."""
    monkeypatch.setattr("integration_tests.faults_test.planted", fault)
    report = verified(harness.fitted((1, 2)), "adam")
    assert not report.passed, report
    assert (report.layer, report.where) == FAULTS[fault], report
