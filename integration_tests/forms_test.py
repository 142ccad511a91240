"""Every form of a model, first used in every way, in its scope or after it.

A model has an `Input`, or is built by its first use, or is a class that says
nothing of its variables. It may first be used by `fit`, by a call, or by a loop
of the user's own. Its losses are those of one device.
"""

import contextlib
import functools
import itertools
import math

import keras
import numpy as np
import pytest
from keras import layers

from integration_tests import harness
from keras_tp import distribution as dist
from keras_tp.distribution import model_state
from keras_tp.testing import uses_test

BATCH = 4
STEPS = 3
RATE = 0.05
OUTPUTS = 6


class Attention(layers.Layer):
    """A layer as people write them: without `build`."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def call(self, x):
        return x + self.inner(x, x)


class Tied(layers.Layer):
    """A table that is looked up, and read again for the logits."""

    def __init__(self):
        super().__init__()
        self.table = layers.ReversibleEmbedding(24, 8)

    def call(self, ids):
        return self.table(self.table(ids), reverse=True)


def dense(units=OUTPUTS, **kwargs):
    return layers.Dense(units, bias_initializer="normal", **kwargs)


def attention():
    return Attention(layers.MultiHeadAttention(4, 3))


def grouped():
    return Attention(layers.GroupQueryAttention(4, 4, 2))


def images(layer):
    return lambda: [layer(), layers.ReLU(), layers.Flatten(), dense()]


def sequences(layer):
    return lambda: [dense(8), layer(), layers.Flatten(), dense()]


VECTOR, SEQUENCE, IMAGE, IDS = (12,), (5, 12), (6, 6, 4), (5,)
# Name -> the layers, one after the other, and the shape of a sample.
KINDS = {
    "dense": (lambda: [dense(16, activation="gelu"), dense()], VECTOR),
    "einsum_dense": (
        lambda: [
            layers.EinsumDense("bi,ihd->bhd", (4, 8), bias_axes="hd"),
            layers.EinsumDense("bhd,hdo->bo", (OUTPUTS,), bias_axes="o"),
        ],
        VECTOR,
    ),
    "embedding": (
        lambda: [layers.Embedding(24, 8), layers.Flatten(), dense()],
        IDS,
    ),
    "tied_embedding": (lambda: [Tied()], IDS),
    "attention": (sequences(attention), SEQUENCE),
    "grouped_attention": (sequences(grouped), SEQUENCE),
    "layer_norm": (
        lambda: [dense(8), layers.LayerNormalization(), dense()],
        VECTOR,
    ),
    "rms_norm": (
        lambda: [dense(8), layers.RMSNormalization(), dense(16), dense()],
        VECTOR,
    ),
    "batch_norm": (
        lambda: [dense(8), layers.BatchNormalization(), dense()],
        VECTOR,
    ),
    "conv1d": (sequences(lambda: layers.Conv1D(8, 3)), SEQUENCE),
    "conv2d": (images(lambda: layers.Conv2D(8, 3)), IMAGE),
    "depthwise": (images(lambda: layers.DepthwiseConv2D(3)), IMAGE),
    "separable": (images(lambda: layers.SeparableConv2D(8, 3)), IMAGE),
    "lstm": (lambda: [layers.LSTM(8), dense()], SEQUENCE),
    "gru": (lambda: [layers.GRU(8), dense()], SEQUENCE),
    "bidirectional": (
        lambda: [layers.Bidirectional(layers.SimpleRNN(4)), dense()],
        SEQUENCE,
    ),
}


class Chain(keras.Model):
    """A model as people write them: without `build`, and without `Input`."""

    def __init__(self, parts):
        super().__init__()
        self.parts = parts

    def call(self, x):
        for part in self.parts:
            x = part(x)
        return x


def functional(parts, spec):
    x = inputs = keras.Input(spec.shape, dtype=spec.dtype)
    for part in parts:
        x = part(x)
    return keras.Model(inputs, x)


def marked_as_built(parts, spec):
    """Keras takes `build` of such a class for done, without a variable."""
    model = Chain(parts)
    with pytest.warns(UserWarning, match="unbuilt state"):
        model.build((None, *spec.shape))
    return model


FORMS = {
    "functional": functional,
    "sequential": lambda parts, spec: keras.Sequential(parts),
    "subclassed": lambda parts, spec: Chain(parts),
    "marked_as_built": marked_as_built,
}


class Spec:
    """Shape and dtype of a sample."""

    def __init__(self, shape):
        self.shape = shape
        self.dtype = "int32" if shape == IDS else "float32"


def data(shape):
    rng = np.random.default_rng(7)
    if shape == IDS:
        x = rng.integers(0, 24, (BATCH, *shape)).astype("int32")
    else:
        x = rng.normal(size=(BATCH, *shape)).astype("float32")
    return x, rng.normal(size=(BATCH, OUTPUTS)).astype("float32")


def targets(kind, y):
    """A tied table has a logit for each row and each id."""
    if kind != "tied_embedding":
        return y
    rng = np.random.default_rng(8)
    return rng.normal(size=(BATCH, *IDS, 24)).astype("float32")


def by_fit(model, x, y):
    history = model.fit(x, y, BATCH, epochs=STEPS, shuffle=False, verbose=0)
    return history.history["loss"]


def by_call(model, x, y):
    model(x)
    return by_fit(model, x, y)


def by_predict(model, x, y):
    model.predict(x, verbose=0)
    return by_fit(model, x, y)


def by_evaluate(model, x, y):
    model.evaluate(x, y, verbose=0)
    return by_fit(model, x, y)


def by_batch(model, x, y):
    return [float(model.train_on_batch(x, y)) for _ in range(STEPS)]


def by_loop(model, x, y):
    return uses_test.loop(model, x, y, STEPS)


def by_function(model, x, y):
    """A step in a `tf.function`, which makes the variables in its trace."""
    import tensorflow as tf

    @tf.function
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x, training=True) - y) ** 2)
        variables = model.trainable_variables
        gradients = tape.gradient(loss, variables)
        model.optimizer.apply_gradients(zip(gradients, variables))
        return loss

    x, y = tf.constant(x), tf.constant(y)
    return [float(step(x, y)) for _ in range(STEPS)]


USES = {
    "fit": by_fit,
    "call": by_call,
    "predict": by_predict,
    "evaluate": by_evaluate,
    "train_on_batch": by_batch,
    "loop": by_loop,
}
if keras.config.backend() == "tensorflow":
    USES["function"] = by_function


def make(kind, form):
    keras.utils.set_random_seed(3)
    parts, shape = KINDS[kind]
    model = FORMS[form](parts(), Spec(shape))
    # With a slot for each weight.
    model.compile(keras.optimizers.SGD(RATE, momentum=0.9), "mse")
    return model


def run(kind, use, model):
    x, y = data(KINDS[kind][1])
    return USES[use](model, x, targets(kind, y))


@functools.cache
def reference(kind, form, use):
    """The losses of the same model, used in the same way, on one device."""
    harness.assert_plain()
    return run(kind, use, make(kind, form))


PLACES = ("inside", "after")
WAYS = list(itertools.product(FORMS, USES, PLACES))
OTHERS = [kind for kind in KINDS if kind != "dense"]
# Each kind but "dense" gets some ways, and each way gets at least one kind.
# This step has no factor in common with the number of ways.
STRIDE = 17
EACH = math.ceil(len(WAYS) / len(OTHERS))
# All ways for "dense", some for each other kind, and for each the way in which
# most differs.
IN_CI = {
    *(("dense", *way) for way in WAYS),
    *(
        (kind, *WAYS[STRIDE * (EACH * i + k) % len(WAYS)])
        for i, kind in enumerate(OTHERS)
        for k in range(EACH)
    ),
    *((kind, "marked_as_built", "loop", "after") for kind in OTHERS),
}
CASES = [
    pytest.param(*case, marks=[] if case in IN_CI else [pytest.mark.slow])
    for case in itertools.product(KINDS, FORMS, USES, PLACES)
]


def test_each_way_is_run():
    assert {case[1:] for case in IN_CI if case[0] != "dense"} == set(WAYS)


@pytest.mark.parametrize("kind, form, use, where", CASES)
def test_losses_are_those_of_one_device(kind, form, use, where):
    losses = reference(kind, form, use)
    parallel = dist.TensorParallel(harness.mesh(harness.fitted((1, 2))))
    with contextlib.ExitStack() as scope:
        scope.enter_context(parallel.scope())
        model = make(kind, form)
        if where == "after":
            scope.close()
        got = run(kind, use, model)
    np.testing.assert_allclose(got, losses, rtol=1e-5)
    assert model._planned_under is parallel
    # A backend may lay some of them out in another way.
    plan = parallel.plan
    planned = {row.path: plan.layout_of(row).axes for row in plan.variables}
    report = dist.describe(model)
    split = [row for row in report.rows if row.is_split]
    assert split
    for row in report.rows:
        if row.role == "weight":
            assert row.axes == planned[row.path]


def declared(name):
    """Returns a distribution whose layouts are not planned."""
    shape = harness.fitted((1, 2))
    if name == "data":
        devices = harness.mesh(shape).devices.flatten().tolist()
        return dist.DataParallel(devices=devices)
    layout_map = dist.LayoutMap(harness.mesh(shape))
    layout_map[".*kernel"] = (None, "model")
    return dist.ModelParallel(layout_map=layout_map)


@pytest.mark.parametrize("name", ["data", "map"])
@pytest.mark.parametrize("form", FORMS)
def test_a_model_remembers_declared_layouts(form, name):
    """It is built after the scope of its distribution was left."""
    losses = reference("dense", form, "fit")
    parallel = declared(name)
    with parallel.scope():
        model = make("dense", form)
    got = run("dense", "fit", model)
    np.testing.assert_allclose(got, losses, rtol=1e-5)
    assert model_state.distribution_of(model) is parallel
    rows = [r for r in dist.describe(model).rows if r.role == "weight"]
    assert len(rows) == 4
    split = {row.path.rpartition("/")[2] for row in rows if row.is_split}
    assert split == ({"kernel"} if name == "map" else set())
    held = {len(row.device_bytes) for row in rows}
    assert held == {parallel.device_mesh.devices.size}


def test_a_loop_whose_first_step_builds_the_model(monkeypatch):
    """What the step has read is not moved: the next call plans the model."""
    monkeypatch.setattr(model_state, "build_parts", lambda *args: None)
    losses = reference("einsum_dense", "marked_as_built", "loop")
    parallel = dist.TensorParallel(harness.mesh(harness.fitted((1, 2))))
    with parallel.scope():
        model = make("einsum_dense", "marked_as_built")
        got = run("einsum_dense", "loop", model)
    np.testing.assert_allclose(got, losses, rtol=1e-5)
    assert model._planned_under is parallel
