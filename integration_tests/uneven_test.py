"""Variables with a dim that the devices do not divide, as a vocabulary."""

import functools

import keras
import numpy as np
import pytest
from keras import layers

from integration_tests import harness
from keras_tp import backend
from keras_tp import distribution

BACKEND = keras.config.backend()
WORDS, LENGTH, WIDTH = 1003, 8, 16
TABLE = "words/embeddings"
SHAPES = harness.shapes((1, 4), (2, 2), slow=[(1, 2)])
SPLITS = backend.distribution_lib.splits_unevenly()


def network(words=WORDS, tied=True):
    keras.utils.set_random_seed(1)
    inputs = keras.Input((LENGTH,), dtype="int32")
    table = layers.ReversibleEmbedding(
        words, WIDTH, tie_weights=tied, name="words"
    )
    x = table(inputs)
    y = layers.Dense(32, activation="gelu", name="up")(x)
    x = x + layers.Dense(WIDTH, name="down")(y)
    outputs = table(x, reverse=True)
    return keras.Model(inputs, outputs, name="network")


def data():
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, WORDS, (2, 8, LENGTH), "int32")
    # The last words are those of the smaller part.
    x[:, 0], y[:, -1] = WORDS - 1, WORDS - 1
    return x, y


OPTIMIZERS = {
    "adam": lambda: harness.SummedAdam(0.01),
    "clipped": lambda: keras.optimizers.SGD(0.5, global_clipnorm=0.1),
    "factored": lambda: keras.optimizers.Adafactor(0.01),
    "trust": lambda: keras.optimizers.Lamb(0.01),
    "accumulated": lambda: keras.optimizers.SGD(
        0.1, momentum=0.9, gradient_accumulation_steps=2
    ),
}


def trained(model, optimizer):
    model.compile(
        OPTIMIZERS[optimizer](),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy", keras.metrics.SparseTopKCategoricalAccuracy(5)],
    )
    x, y = data()
    history = model.fit(x, y, batch_size=4, epochs=3, shuffle=False, verbose=0)
    return history.history, harness.weights_of(model), model.predict(x)


@functools.cache
def reference(optimizer, tied):
    harness.assert_plain()
    return trained(network(tied=tied), optimizer)


def parallel(shape):
    return distribution.TensorParallel(harness.mesh(shape))


def assert_split(model, count):
    """Each device holds a part of the table, and no more of its slots."""
    rows = {row.path: row for row in distribution.describe(model).rows}
    part = -(-WORDS // count) * WIDTH * 4
    assert rows[TABLE].shape == (WORDS, WIDTH)
    if not SPLITS:
        assert rows[TABLE].axes[0] is None
        return
    assert rows[TABLE].axes == ("model", None)
    for row in rows.values():
        if row.shape == (WORDS, WIDTH):
            assert max(row.device_bytes.values()) == part, row
            # The smaller part may be padded.
            last = part - count * WIDTH * 4
            assert min(row.device_bytes.values()) > last, row


@SHAPES
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_training_is_that_of_one_device(tied, shape):
    check_training("adam", tied, shape)


@pytest.mark.skipif(not SPLITS, reason="the table is split by columns")
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_optimizers(optimizer):
    check_training(optimizer, True, harness.fitted((1, 4)))


def check_training(optimizer, tied, shape):
    want, want_weights, want_outputs = reference(optimizer, tied)
    with parallel(shape).scope():
        model = network(tied=tied)
        got, weights, outputs = trained(model, optimizer)
        assert_split(model, shape[1])
    assert want["loss"][-1] != want["loss"][0]
    for name, values in want.items():
        np.testing.assert_allclose(got[name], values, rtol=1e-5, err_msg=name)
    for path, value in want_weights.items():
        assert weights[path].shape == value.shape
        np.testing.assert_allclose(
            weights[path], value, atol=1e-5, err_msg=path
        )
    np.testing.assert_allclose(outputs, want_outputs, atol=1e-5)


@pytest.mark.skipif(not SPLITS, reason="the table is split by columns")
@SHAPES
def test_it_communicates_as_a_table_that_divides(shape):
    def counted(words):
        with parallel(shape).scope():
            model = network(words)
            model.compile(
                keras.optimizers.SGD(0.1),
                keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            )
            x, y = data()
            return distribution.count_collectives(model, x, y)

    uneven, even = counted(WORDS), counted(WORDS + 1)
    for name, (count, _) in even.items():
        assert uneven[name][0] == count, name
    assert uneven["all_gather"][1] < WORDS * WIDTH * 4


def test_the_plan_says_so():
    mesh = harness.mesh(harness.fitted((1, 4)))
    plan = distribution.plan_sharding(network, mesh)
    row = plan[TABLE]
    count = mesh.shape[1]
    if not SPLITS:
        # The plan is the same, and says what this backend does instead.
        instead = plan.instead[TABLE]
        assert instead.axes[0] is None
        assert "1003 does not divide" in instead.obstacles[0]
        assert "no parts of different sizes" in instead.obstacles[0]
    assert row.axes == ("model", None)
    assert f"1003 does not divide by {count}" in row.why
    assert plan.device_bytes(row) == -(-WORDS // count) * WIDTH * 4
    again = distribution.ShardingPlan.from_json(plan.to_json(), mesh)
    assert again.variables == plan.variables
    with again.distribution().scope():
        model = network()
    assert_split(model, count)


def test_what_is_never_split_unevenly():
    """Small dims, heads, and dims that an operation needs whole."""

    def small():
        inputs = keras.Input((6,))
        x = layers.Dense(7, name="up")(inputs)
        return keras.Model(inputs, layers.Dense(6, name="down")(x))

    def heads():
        inputs = keras.Input((4, 16))
        x = layers.MultiHeadAttention(3, 5, name="attention")(inputs, inputs)
        return keras.Model(inputs, x)

    def sort():
        inputs = keras.Input((WIDTH,))
        x = keras.ops.sort(layers.Dense(WORDS, name="up")(inputs), -1)
        return keras.Model(inputs, layers.Dense(4, name="down")(x))

    mesh = distribution.DeviceMesh(
        (1, 2), ["batch", "model"], [f"cpu:{i}" for i in range(2)]
    )
    for build in (small, heads, sort):
        plan = distribution.plan_sharding(build, mesh)
        for row in plan.variables:
            for size, axis in zip(row.shape, row.axes):
                assert axis is None or size % 2 == 0, row


@SHAPES
def test_files(shape, tmp_path):
    _, _, want = reference("adam", True)
    x, _ = data()
    with parallel(shape).scope():
        model = network()
        trained(model, "adam")
        model.save_weights(tmp_path / "model.weights.h5")
        model.save(tmp_path / "model.keras")
        for again in (
            _loaded(network(), tmp_path),
            keras.saving.load_model(
                tmp_path / "model.keras",
                custom_objects={"SummedAdam": harness.SummedAdam},
            ),
        ):
            np.testing.assert_allclose(again.predict(x), want, atol=1e-5)
            assert_split(again, shape[1])
    plain = _loaded(network(), tmp_path)
    np.testing.assert_allclose(plain.predict(x), want, atol=1e-5)


def _loaded(model, tmp_path):
    model.load_weights(tmp_path / "model.weights.h5")
    return model


@SHAPES
def test_a_trained_model_is_moved_there_and_back(shape):
    model, plain = network(), network()
    for m in (model, plain):
        m.compile(
            harness.SummedAdam(0.01),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        )

    def step():
        want = np.ravel(plain.train_on_batch(*data()))[0]
        got = np.ravel(model.train_on_batch(*data()))[0]
        np.testing.assert_allclose(got, want, rtol=1e-5)

    step()
    even = distribution.LayoutMap(harness.mesh(shape))
    even[f".*{TABLE}"] = (None, "model")
    for current in (
        parallel(shape),
        distribution.ModelParallel(layout_map=even),
        parallel(shape),
    ):
        distribution.distribute_model(model, current)
        step()
        step()
    assert_split(model, shape[1])


@SHAPES
def test_a_map_says_that_a_layout_is_uneven(shape):
    mesh = harness.mesh(shape)
    layout_map = distribution.LayoutMap(mesh)
    layout_map[f".*{TABLE}"] = ("model", None)
    with distribution.ModelParallel(layout_map=layout_map).scope():
        with pytest.raises(ValueError, match="layout.uneven = True"):
            network()
    layout_map = distribution.LayoutMap(mesh)
    layout = distribution.TensorLayout(("model", None), mesh)
    layout.uneven = True
    layout_map[f".*{TABLE}"] = layout
    with distribution.ModelParallel(layout_map=layout_map).scope():
        if SPLITS:
            model = network()
        else:
            with pytest.warns(UserWarning, match="no parts of different"):
                model = network()
        assert_split(model, shape[1])
        x, _ = data()
        table = model.get_layer("words").embeddings
        assert tuple(table.shape) == (WORDS, WIDTH)
        assert keras.ops.convert_to_numpy(table.value).shape == (WORDS, WIDTH)
        assert np.asarray(model(x)).shape == (8, LENGTH, WORDS)
    with pytest.raises(ValueError, match="does not divide"):
        distribution.distribute_tensor(
            keras.ops.ones((WORDS, 2)),
            layout,
        )


def middle(name):
    """Returns a layer between two that split a dim of `WORDS` features."""
    return {
        "relu6": lambda: layers.ReLU(6.0),
        "hard_silu": lambda: layers.Activation("hard_silu"),
        "dropout": lambda: layers.Dropout(0.5, seed=3),
        "norm": lambda: layers.LayerNormalization(epsilon=1e-5),
        "batch_norm": lambda: layers.BatchNormalization(),
        "softmax": lambda: layers.Softmax(),
        "mean": lambda: layers.Lambda(
            lambda x: x - keras.ops.mean(x, -1, keepdims=True)
        ),
        "variance": lambda: layers.Lambda(
            lambda x: x / keras.ops.std(x, -1, keepdims=True)
        ),
        "cumsum": lambda: layers.Lambda(
            lambda x: keras.ops.cumsum(x, -1) / WORDS
        ),
        "top_k": lambda: layers.Lambda(
            lambda x: x * keras.ops.mean(keras.ops.top_k(x, 3)[0])
        ),
        "sort": lambda: layers.Lambda(lambda x: keras.ops.sort(x, -1)),
        "max": lambda: layers.Lambda(
            lambda x: x * keras.ops.max(x, axis=-1, keepdims=True)
        ),
        "reverse": lambda: layers.Lambda(lambda x: keras.ops.flip(x, -1)),
        "logsumexp": lambda: layers.Lambda(
            lambda x: x - keras.ops.logsumexp(x, -1, keepdims=True)
        ),
        "concatenate": lambda: layers.Lambda(
            lambda x: keras.ops.concatenate([x, -x], -1)[..., :WORDS]
        ),
        "slice": lambda: layers.Lambda(
            lambda x: keras.ops.pad(x[:, 5:700], [(0, 0), (0, WORDS - 695)])
        ),
    }[name]()


MIDDLES = (
    "relu6 hard_silu dropout norm batch_norm softmax mean variance cumsum "
    "top_k max reverse logsumexp concatenate slice"
).split()
if BACKEND == "torch":
    # On JAX, XLA's partitioner aborts in the gradient: a scatter into a dim
    # with parts of different sizes. Plans keep a dim whole that is sorted.
    MIDDLES.append("sort")


@pytest.mark.parametrize("name", MIDDLES)
def test_operations_on_activations_of_uneven_parts(name):
    """The kernels' layouts are given, so that the dim is split in any case."""

    def build():
        keras.utils.set_random_seed(1)
        inputs = keras.Input((WIDTH,))
        x = layers.Dense(WORDS, name="up")(inputs)
        layer = middle(name)
        layer.name = "middle"
        x = layer(x)
        model = keras.Model(inputs, layers.Dense(4, name="down")(x))
        model.compile(keras.optimizers.SGD(0.001), "mse")
        return model

    rng = np.random.default_rng(0)
    x = rng.standard_normal((8, WIDTH), "float32")
    y = rng.standard_normal((8, 4), "float32")
    layout_map = distribution.LayoutMap(harness.mesh(harness.fitted((1, 4))))
    for pattern, axes in {
        ".*up/kernel": (None, "model"),
        ".*up/bias": ("model",),
        ".*down/kernel": ("model", None),
    }.items():
        layout_map[pattern] = axes
        layout_map[pattern].uneven = True
    plain = build()
    current = distribution.ModelParallel(layout_map=layout_map)
    if not SPLITS:
        pytest.skip("the kernels are whole")
    want = [plain.predict(x, verbose=0)]
    want += [np.ravel(plain.train_on_batch(x, y))[0] for _ in range(3)]
    with current.scope():
        model = build()
    assert harness.split_paths(model) == {"up/kernel", "up/bias", "down/kernel"}
    got = [model.predict(x, verbose=0)]
    got += [np.ravel(model.train_on_batch(x, y))[0] for _ in range(3)]
    assert harness.difference(got[0], want[0]) < 1e-5
    np.testing.assert_allclose(got[1:], want[1:], rtol=1e-5)
    weights = harness.weights_of(plain)
    for path, value in harness.weights_of(model).items():
        assert harness.difference(value, weights[path]) < 1e-5, path


@SHAPES
@pytest.mark.parametrize("kind", ["lora", "int8"])
def test_a_table_that_is_changed(kind, shape):
    def changed(model):
        model.compile("sgd", "sparse_categorical_crossentropy")
        if kind == "lora":
            model.get_layer("words").enable_lora(4)
            model.compile(
                keras.optimizers.SGD(0.1),
                keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            )
            model.fit(x, y, batch_size=4, shuffle=False, verbose=0)
        else:
            model.quantize(kind)
        return model.predict(x, verbose=0)

    x, y = data()
    want = changed(network(tied=kind != "lora"))
    with parallel(shape).scope():
        model = network(tied=kind != "lora")
        got = changed(model)
        if SPLITS:
            rows = distribution.describe(model).rows
            tables = [row for row in rows if row.shape[:1] == (WORDS,)]
            assert tables and all(row.axes[0] == "model" for row in tables)
    np.testing.assert_allclose(got, want, atol=1e-5)
