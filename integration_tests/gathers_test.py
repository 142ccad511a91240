"""Plans that gather the outputs of layers train as one device does."""

import contextlib

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


def residual(x):
    """XLA, left to itself, splits the sums between the gathers too."""
    x = layers.Dense(WIDTH, name="first")(x)
    for k in range(2):
        y = layers.LayerNormalization()(x)
        y = layers.Dense(48, name=f"in_{k}")(y)
        y = layers.LayerNormalization()(y)
        x = x + layers.Dense(WIDTH, name=f"out_{k}")(y)
    return layers.LayerNormalization()(x)


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


def concatenated(x):
    """Each part is gathered before the parts are concatenated."""
    towers = [layers.Dense(32, name=name)(x) for name in "ab"]
    x = layers.Concatenate(name="both")([layers.ReLU()(x) for x in towers])
    x = layers.Dense(WIDTH, name="down")(x)
    return layers.LayerNormalization(name="norm")(x)


class Two(layers.Layer):
    """Two kernels read one tensor, one of them behind a reshape."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.a = layers.Dense(32, name="a")
        self.b = layers.Dense(32, name="b")
        self.norms = [
            layers.LayerNormalization(name=f"norm_{name}") for name in "ab"
        ]

    def call(self, x):
        half = keras.ops.reshape(x, (-1, LENGTH // 2, 2, WIDTH))
        pairs = zip(self.norms, (self.a(x), self.b(half)))
        parts = [norm(part) for norm, part in pairs]
        return parts[0] + keras.ops.reshape(parts[1], (-1, LENGTH, 32))


def reshaped(x):
    """The gradients of one tensor are added up before their all-reduce."""
    x = layers.Dense(WIDTH, name="open")(x)
    x = layers.LayerNormalization(name="first")(x)
    return Two(name="two")(x)


def reshaped_by_a_layer(x):
    """Here they are not: the gradient of each layer's output is a sum."""
    x = layers.Dense(WIDTH, name="open")(x)
    x = layers.LayerNormalization(name="first")(x)
    half = layers.Reshape((LENGTH // 2, 2, WIDTH))(x)
    half = layers.LayerNormalization()(layers.Dense(32, name="b")(half))
    x = layers.LayerNormalization()(layers.Dense(32, name="a")(x))
    return layers.Add()([x, layers.Reshape((LENGTH, 32))(half)])


# Model -> layers whose output is gathered.
MODELS = {
    dense: ["wide"],
    called_twice: ["square", "square"],
    einsum: ["heads"],
    convolution: ["conv"],
    positions: ["positions"],
    one_key_head: ["gqa/key", "gqa/value"],
    concatenated: ["re_lu", "re_lu_1", "down"],
    reshaped: ["open", "two/a", "two/b"],
    reshaped_by_a_layer: ["open", "a", "b"],
}


if BACKEND != "tensorflow":
    # DTensor there has two all-gathers less than planned.
    MODELS[residual] = ["in_0", "out_0", "in_1", "out_1"]


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
    if BACKEND == "torch" or (body is residual and shape[0] == 1):
        # Others combine gradients, or sum and split in two operations.
        assert counted == {k: v for k, v in predicted.items() if v[0]}


class Large(keras.Model):
    """Not built before its first call, with a kernel that is gathered."""

    def __init__(self):
        super().__init__(name="large")
        # As large as it has to be by default.
        self.wide = layers.Dense(2048, name="wide")
        self.norm = layers.LayerNormalization(name="norm")

    def call(self, x):
        return self.norm(self.wide(x))


def functional():
    inputs = keras.Input((2048,))
    x = layers.Dense(2048, name="wide")(inputs)
    x = layers.LayerNormalization(name="norm")(x)
    return keras.Model(inputs, x, name="large")


def predicted(model, x):
    return model.predict(x, verbose=0)


def called(model, x):
    return keras.ops.convert_to_numpy(model(x))


def fitted(model, x):
    model.compile(keras.optimizers.SGD(0.1), "mse")
    model.fit(x, np.ones_like(x), batch_size=2, verbose=0)
    return model.predict(x, verbose=0)


@pytest.mark.parametrize("is_inside", [True, False], ids=["inside", "after"])
@pytest.mark.parametrize("use", [predicted, called, fitted])
@pytest.mark.parametrize("make", [functional, Large])
def test_a_model_that_is_planned_when_it_is_used(make, use, is_inside):
    x = np.random.default_rng(0).normal(size=(2, 2048)).astype("float32")

    def run(parallel):
        keras.utils.set_random_seed(1)
        with contextlib.ExitStack() as stack:
            if parallel is not None:
                stack.enter_context(parallel.scope())
            model = make()
            if not is_inside:
                stack.close()
            return model, use(model, x)

    _, expected = run(None)
    mesh = harness.mesh(harness.fitted((1, 2)))
    model, found = run(TensorParallel(mesh, strict=True))
    np.testing.assert_allclose(found, expected, atol=1e-5)
    assert "large/wide/kernel" in {
        path if path.startswith("large/") else f"large/{path}"
        for path in harness.split_paths(model)
    }
    counted = distribution.count_collectives(model, x)
    assert counted["all_gather"] == (1, 2 * 2048 * 4)


@pytest.mark.skipif(BACKEND != "jax", reason="a step that JAX compiles")
def test_a_step_that_is_compiled_by_hand():
    import jax

    x = np.random.default_rng(0).normal(size=(2, 2048)).astype("float32")
    keras.utils.set_random_seed(1)
    expected = functional().predict(x, verbose=0)
    keras.utils.set_random_seed(1)
    with TensorParallel(harness.mesh((1, 2))).scope():
        model = functional()
        found, _ = jax.jit(model.stateless_call)(
            [v.value for v in model.trainable_variables],
            [v.value for v in model.non_trainable_variables],
            x,
        )
    np.testing.assert_allclose(found, expected, atol=1e-5)
    assert harness.split_paths(model) == {"wide/kernel", "wide/bias"}


def test_a_layout_map_of_the_plan():
    """`ModelParallel` takes it, without a pattern that names nothing."""
    mesh = harness.mesh(harness.fitted((1, 2)))
    plan = distribution.plan_sharding(
        lambda: build(dense), mesh, gather_outputs=0
    )
    layout_map = plan.layout_map
    layout_map.strict = True
    with distribution.ModelParallel(layout_map=layout_map).scope():
        model, _, (x, y) = trained(dense)
    counted = distribution.count_collectives(model, x, y)
    assert counted["all_gather"] == plan.collectives(8)["all_gather"]


def test_a_plan_for_layers_of_other_names():
    """Each build gives a layer without a name another number."""

    def build():
        inputs = keras.Input((LENGTH, WIDTH))
        parts = [layers.Dense(WIDTH, name=n)(inputs) for n in ("a", "b")]
        x = layers.Concatenate()([layers.ReLU()(part) for part in parts])
        x = layers.Dense(WIDTH, name="down")(x)
        return keras.Model(inputs, layers.LayerNormalization(name="norm")(x))

    keras.utils.clear_session()
    mesh = harness.mesh(harness.fitted((1, 2)))
    plan = distribution.plan_sharding(build, mesh, gather_outputs=0)
    assert [row.path for row in plan.gathers] == ["re_lu", "re_lu_1", "down"]
    x = np.zeros((2, LENGTH, WIDTH), "float32")
    with TensorParallel(plan=plan, strict=True).scope():
        build().predict(x, verbose=0)
        model = build()
        assert "re_lu" not in {layer.name for layer in model.layers}
        with pytest.raises(
            ValueError, match="2 layer.*give these layers a name"
        ):
            model.predict(x, verbose=0)
    with TensorParallel(plan=plan).scope():
        model = build()
        with pytest.warns(match="2 layer.*Received: .'re_lu', 're_lu_1'"):
            model.predict(x, verbose=0)


@pytest.mark.skipif(BACKEND == "torch", reason="two axes need four devices")
def test_with_a_data_axis_that_splits_variables():
    _, losses, _ = trained(dense)
    keras.utils.clear_session()
    plan = distribution.plan_sharding(
        lambda: build(dense),
        harness.mesh((2, 2)),
        fully_shard="batch",
        gather_outputs=0,
    )
    assert plan.gathers and plan["wide/kernel"].axes == ("batch", "model")
    with TensorParallel(plan=plan, strict=True).scope():
        _, found, _ = trained(dense)
    np.testing.assert_allclose(found, losses, rtol=1e-5)


@pytest.mark.skipif(BACKEND != "jax", reason="others export for one device")
@pytest.mark.parametrize("body", [dense, positions])
def test_tensorflow_runs_what_is_exported(body, tmp_path):
    tf = pytest.importorskip("tensorflow")
    keras.utils.clear_session()
    plan = distribution.plan_sharding(
        lambda: build(body), harness.mesh((1, 2)), gather_outputs=0
    )
    assert plan.gathers
    x = np.random.default_rng(3).normal(size=(4, LENGTH, WIDTH))
    x = x.astype("float32")
    with TensorParallel(plan=plan).scope():
        model = build(body)
        expected = model.predict(x, verbose=0)
        model.export(tmp_path / "exported", verbose=False)
    program = tf.saved_model.load(str(tmp_path / "exported"))
    np.testing.assert_allclose(program.serve(x), expected, rtol=1e-4, atol=1e-5)
