"""`keras.RematScope` and `keras.remat` add no collective to a step.

On TensorFlow some modes add all-reduces (`docs/limits.md`), and no all-gather.
"""

import contextlib

import keras
import numpy as np
import pytest

from integration_tests import harness
from keras_tp import distribution

WIDTH = 16
X = np.random.default_rng(0).normal(size=(4, 8, WIDTH)).astype("float32")
SCOPES = {
    "full": dict(mode="full"),
    "activations": dict(mode="activations"),
    "larger_than": dict(mode="larger_than", output_size_threshold=100),
    "list_of_layers": dict(
        mode="list_of_layers", layer_names=["attention_0", "down_1", "lookup"]
    ),
}
if keras.config.backend() == "torch":
    # Keras 3.15 raises.
    del SCOPES["larger_than"]


class Again(keras.layers.Layer):
    """Two layers in one function that is computed again."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.up = keras.layers.Dense(2 * WIDTH, activation="gelu", name="up")
        self.down = keras.layers.Dense(WIDTH, name="down")

    def build(self, shape):
        self.up.build(shape)
        self.down.build((*shape[:-1], 2 * WIDTH))

    def call(self, x):
        return keras.remat(lambda x: self.down(self.up(x)))(x)


def blocks():
    inputs = keras.Input(X.shape[1:])
    x = keras.layers.LayerNormalization()(inputs)
    for i in range(2):
        attention = keras.layers.MultiHeadAttention(
            4, WIDTH // 4, name=f"attention_{i}"
        )
        x = keras.layers.LayerNormalization()(x + attention(x, x))
        up = keras.layers.Dense(2 * WIDTH, activation="gelu", name=f"up_{i}")
        x = x + keras.layers.Dense(WIDTH, name=f"down_{i}")(up(x))
    return keras.Model(inputs, x)


def function():
    inputs = keras.Input(X.shape[1:])
    x = keras.layers.LayerNormalization()(inputs)
    for _ in range(2):
        x = x + Again()(x)
    return keras.Model(inputs, x)


def square():
    """A column-parallel layer has as many units as inputs."""
    inputs = keras.Input(X.shape[1:])
    x = keras.layers.LayerNormalization()(inputs)
    x = keras.layers.Dense(WIDTH, activation="gelu", name="up_1")(x)
    return keras.Model(inputs, keras.layers.Dense(WIDTH, name="down_1")(x))


def tokens():
    inputs = keras.Input((8,), dtype="int32")
    x = keras.layers.Embedding(32, WIDTH, name="lookup")(inputs)
    x = keras.layers.LayerNormalization()(x)
    up = keras.layers.Dense(2 * WIDTH, activation="gelu", name="up_1")
    return keras.Model(inputs, keras.layers.Dense(WIDTH, name="down_1")(up(x)))


class AddsLoss(keras.layers.Layer):
    """A layer in a layer, which adds a loss."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.inner = keras.layers.ActivityRegularization(l2=0.01)

    def call(self, x):
        self.add_loss(0.1 * keras.ops.mean(keras.ops.abs(x)))
        return self.inner(x)


def stateful():
    """Layers that draw numbers, keep averages, add losses, or take options."""
    inputs = keras.Input(X.shape[1:])
    x = keras.layers.Dense(2 * WIDTH, activation="gelu", name="up_1")(inputs)
    x = keras.layers.Dropout(0.5)(keras.layers.BatchNormalization()(x))
    x = AddsLoss()(keras.layers.Dense(WIDTH, name="down_1")(x))
    attention = keras.layers.MultiHeadAttention(4, 4, dropout=0.1)
    return keras.Model(inputs, attention(x, x, use_causal_mask=True))


class AddsContext(keras.layers.Layer):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.dense = keras.layers.Dense(WIDTH)

    def build(self, shape):
        self.dense.build(shape)

    def call(self, x, context=None):
        return x + self.dense(context)


def arguments():
    """Tensors by keyword and in lists, and arguments that are no tensors."""
    inputs = keras.Input(X.shape[1:])
    x = keras.layers.Dense(2 * WIDTH, activation="gelu", name="up_1")(inputs)
    x = keras.layers.Dense(WIDTH, name="down_1")(x)
    y = keras.layers.MultiHeadAttention(4, 4)(query=x, value=x)
    y = AddsContext()(inputs, context=y)
    y = keras.layers.Concatenate()([keras.layers.Add()([x, y]), y])
    return keras.Model(inputs, y[..., WIDTH // 2 : WIDTH // 2 + WIDTH])


def train(build, scope=None, run_eagerly=False):
    """Returns a trained model, its batch, and its losses."""
    keras.utils.clear_session()
    keras.utils.set_random_seed(2)
    with keras.RematScope(**scope) if scope else contextlib.nullcontext():
        model = build()
        x = X
        if model.input.dtype == "int32":
            x = np.arange(32, dtype="int32").reshape(4, 8)
        model.compile(keras.optimizers.SGD(0.1), "mse", run_eagerly=run_eagerly)
        losses = [model.train_on_batch(x, X) for _ in range(3)]
    return model, x, losses


def split(build, scope=None):
    """Trains a split model; returns the collectives of a step, and losses."""
    mesh = harness.mesh(harness.fitted((1, 2)))
    with distribution.TensorParallel(mesh, strict=False).scope():
        model, x, losses = train(build, scope)
        assert harness.split_paths(model)
        counted = distribution.count_collectives(model, x, X)
    return {kind: pair for kind, pair in counted.items() if pair[0]}, losses


CASES = [*((blocks, name) for name in SCOPES), (function, None)]
CASES += [(square, "full"), (tokens, "full"), (tokens, "list_of_layers")]


@pytest.mark.parametrize("build,scope", CASES)
def test_it_repeats_no_collective(build, scope):
    again = SCOPES.get(scope)
    _, _, expected = train(build)
    counted, found = split(build, again)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    if keras.config.backend() == "tensorflow":
        assert set(counted) == {"all_reduce"}
        if scope not in (None, "activations"):
            return
    if build is function:
        # The same layers, without `keras.remat`.
        remat, keras.remat = keras.remat, lambda f: f
        try:
            without, _ = split(build)
        finally:
            keras.remat = remat
    else:
        without, _ = split(build)
    assert counted == without
    if build is blocks:
        # The figures of `docs/measured.md`.
        expected = 12 if keras.config.backend() == "jax" else 8
        assert counted["all_reduce"][0] == expected


@pytest.mark.parametrize(
    "scope,run_eagerly",
    [("full", False), ("larger_than", False), ("full", True)],
)
def test_state_and_losses_are_those_of_one_device(scope, run_eagerly):
    if scope not in SCOPES:
        pytest.skip("Keras 3.15 raises")
    one, _, expected = train(stateful)
    mesh = harness.mesh(harness.fitted((1, 2)))
    with distribution.TensorParallel(mesh, strict=False).scope():
        model, _, losses = train(stateful, SCOPES[scope], run_eagerly)
        assert harness.split_paths(model)
        np.testing.assert_allclose(losses, expected, rtol=1e-5)
        # Averages and seeds too.
        for a, b in zip(model.variables, one.variables, strict=True):
            np.testing.assert_allclose(
                keras.ops.convert_to_numpy(a),
                keras.ops.convert_to_numpy(b),
                rtol=1e-4,
                atol=1e-6,
                err_msg=a.path,
            )


@pytest.mark.parametrize("run_eagerly", [False, True])
def test_gradients_reach_all_arguments(run_eagerly):
    _, _, expected = train(arguments)
    mesh = harness.mesh(harness.fitted((1, 2)))
    with distribution.TensorParallel(mesh, strict=False).scope():
        model, _, losses = train(arguments, SCOPES["full"], run_eagerly)
        assert harness.split_paths(model)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)


@pytest.mark.parametrize("scope", [None, "full"])
def test_it_computes_again(scope):
    """On torch, which does not trace, a layer runs once more."""
    if keras.config.backend() != "torch":
        pytest.skip("see backend/jax/rematerialization_test.py")
    calls = []

    class Counting(keras.layers.Layer):
        def call(self, x):
            calls.append(None)
            return keras.ops.gelu(x)

    def build():
        inputs = keras.Input(X.shape[1:])
        x = keras.layers.Dense(2 * WIDTH, name="up")(inputs)
        outputs = keras.layers.Dense(WIDTH, name="down")(Counting()(x))
        return keras.Model(inputs, outputs)

    mesh = harness.mesh(harness.fitted((1, 2)))
    with distribution.TensorParallel(mesh, strict=False).scope():
        model, x, _ = train(build, SCOPES.get(scope))
        calls.clear()
        model.train_on_batch(x, X)
    assert len(calls) == 1 if scope is None else len(calls) > 1


def test_it_computes_to_the_end():
    """An error that stops it holds tensors, as Keras's tracebacks do."""
    if keras.config.backend() != "torch":
        pytest.skip("other backends trace it once")
    ends = []

    class Ending(keras.layers.Layer):
        def call(self, x):
            def run(x):
                # The gradient needs no result of the last operation.
                x = keras.ops.gelu(x) + 1.0
                ends.append(None)
                return x

            return keras.remat(run)(x)

    def build():
        inputs = keras.Input(X.shape[1:])
        x = keras.layers.Dense(2 * WIDTH, name="up")(inputs)
        outputs = keras.layers.Dense(WIDTH, name="down")(Ending()(x))
        return keras.Model(inputs, outputs)

    mesh = harness.mesh(harness.fitted((1, 2)))
    with distribution.TensorParallel(mesh, strict=False).scope():
        model, x, _ = train(build)
        ends.clear()
        model.train_on_batch(x, X)
    assert len(ends) == 2


def test_it_is_not_compiled():
    if keras.config.backend() != "torch":
        pytest.skip("torch's compiler loses gradients of split variables")
    _, _, expected = train(blocks, SCOPES["full"])
    mesh = harness.mesh(harness.fitted((1, 2)))
    with distribution.TensorParallel(mesh).scope():
        with keras.RematScope(mode="full"):
            keras.utils.set_random_seed(2)
            model = blocks()
        model.compile(keras.optimizers.SGD(0.1), "mse", jit_compile=True)
        with pytest.warns(UserWarning, match="RematScope.*jit_compile=False"):
            found = [model.train_on_batch(X, X)]
        found += [model.train_on_batch(X, X) for _ in range(2)]
    np.testing.assert_allclose(found, expected, rtol=1e-5)
