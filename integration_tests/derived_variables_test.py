"""LoRA and quantization of models that are sharded already, or will be.

What they add is split as its kernel, and the numbers are those of one device.
"""

import collections
import functools
import gc
import weakref

import keras
import numpy as np
import pytest
from keras import layers

import keras_tp
from integration_tests import harness
from keras_tp import distribution

TOLERANCE = 1e-5
RANK = 2
TOKENS, LENGTH, WIDTH, INNER, HEADS = 24, 6, 12, 32, 4
SHAPES = harness.shapes((1, 2), (1, 4))

Case = collections.namedtuple("Case", ["build", "data", "layouts"])


def layer(cls, *args, **kwargs):
    """A layer with a bias that is not zero."""
    bias = keras.initializers.RandomUniform(-0.5, 0.5, seed=2)
    return cls(*args, bias_initializer=bias, **kwargs)


def table(cls, width, **kwargs):
    """An embedding of tokens, not as small as Keras's own."""
    values = keras.initializers.RandomUniform(-1, 1, seed=3)
    return cls(
        TOKENS, width, embeddings_initializer=values, name="tokens", **kwargs
    )


def mixed():
    """A table split over rows, a pair of matrices and a pair with heads."""
    inputs = keras.Input((LENGTH,), dtype="int32")
    x = table(layers.Embedding, INNER)(inputs)
    x = layer(layers.Dense, WIDTH, name="open")(x)
    x = layer(layers.Dense, INNER, activation="relu", name="up")(x)
    x = layer(layers.Dense, WIDTH, name="down")(x)
    x = layer(
        layers.EinsumDense,
        "abc,cde->abde",
        output_shape=(LENGTH, HEADS, INNER // HEADS),
        bias_axes="de",
        name="query",
    )(x)
    x = layer(
        layers.EinsumDense,
        "abde,dec->abc",
        output_shape=(LENGTH, WIDTH),
        bias_axes="c",
        name="output",
    )(x)
    return keras.Model(inputs, x, name="mixed")


def columns():
    """A table split over its columns."""
    inputs = keras.Input((LENGTH,), dtype="int32")
    x = table(layers.Embedding, INNER)(inputs)
    return keras.Model(inputs, layer(layers.Dense, WIDTH, name="down")(x))


def reversible(tie_weights):
    def build():
        inputs = keras.Input((LENGTH,), dtype="int32")
        tokens = table(
            layers.ReversibleEmbedding, WIDTH, tie_weights=tie_weights
        )
        x = tokens(inputs)
        x = layer(layers.Dense, INNER, activation="relu", name="up")(x)
        x = layer(layers.Dense, WIDTH, name="down")(x)
        return keras.Model(inputs, tokens(x, reverse=True))

    return build


def images():
    inputs = keras.Input((5, 5, 3))
    x = layer(layers.Conv2D, 8, 3, padding="same", name="up")(inputs)
    return keras.Model(inputs, layer(layers.Conv2D, 6, 1, name="down")(x))


def ids(outputs):
    rng = np.random.default_rng(3)
    x = rng.integers(0, TOKENS, (4, LENGTH)).astype("int32")
    return x, rng.standard_normal((4, LENGTH, outputs), "float32")


def pixels():
    rng = np.random.default_rng(3)
    x = rng.standard_normal((4, 5, 5, 3), "float32")
    return x, rng.standard_normal((4, 5, 5, 6), "float32")


PAIR = {
    "up/kernel": (None, "model"),
    "up/bias": ("model",),
    "down/kernel": ("model", None),
}
CASES = {
    "mixed": Case(
        mixed,
        functools.partial(ids, WIDTH),
        {
            "tokens/embeddings": ("model", None),
            **PAIR,
            "query/kernel": (None, "model", None),
            "query/bias": ("model", None),
            "output/kernel": ("model", None, None),
        },
    ),
    "columns": Case(
        columns,
        functools.partial(ids, WIDTH),
        {
            "tokens/embeddings": (None, "model"),
            "down/kernel": ("model", None),
        },
    ),
    "tied": Case(
        reversible(True),
        functools.partial(ids, TOKENS),
        {"tokens/embeddings": ("model", None), **PAIR},
    ),
    "untied": Case(
        reversible(False),
        functools.partial(ids, TOKENS),
        {
            "tokens/embeddings": ("model", None),
            "tokens/reverse_embeddings": (None, "model"),
            **PAIR,
        },
    ),
    "images": Case(
        images,
        pixels,
        {
            "up/kernel": (None, None, None, "model"),
            "up/bias": ("model",),
            "down/kernel": (None, None, "model", None),
        },
    ),
}

# What is split after a change; a bias stays as it was.
LORA = {
    "mixed": {
        "tokens/embeddings": ("model", None),
        "tokens/lora_embeddings_a": ("model", None),
        "up/kernel": (None, "model"),
        "up/lora_kernel_b": (None, "model"),
        "down/kernel": ("model", None),
        "down/lora_kernel_a": ("model", None),
        "query/kernel": (None, "model", None),
        "query/lora_kernel_a": (None, "model", None),
        "output/kernel": ("model", None, None),
        "output/lora_kernel_a": ("model", None, None),
    },
    "columns": {
        "tokens/embeddings": (None, "model"),
        "tokens/lora_embeddings_b": (None, "model"),
        "down/kernel": ("model", None),
        "down/lora_kernel_a": ("model", None),
    },
    "images": {
        "up/kernel": (None, None, None, "model"),
        "up/lora_kernel_b": (None, "model"),
        "down/kernel": (None, None, "model", None),
        "down/lora_kernel_a": (None, None, "model", None),
    },
}
LORA["tied"] = LORA["untied"] = {
    path: axes
    for path, axes in LORA["mixed"].items()
    if path.split("/")[0] in ("tokens", "up", "down")
}
LORA["untied"] = {
    **LORA["untied"],
    "tokens/reverse_embeddings": (None, "model"),
}
QUERY_INT8 = {
    "query/kernel": (None, "model", None),
    "query/kernel_scale": (None, None, "model", None),
    "output/kernel": ("model", None, None),
}
# int4 makes matrices of them: heads of the query are columns.
QUERY_INT4 = {
    "query/kernel": (None, "model"),
    "query/kernel_scale": ("model",),
    "output/kernel": ("model", None),
}
QUANTIZED = {
    "tokens/embeddings": ("model", None),
    "tokens/embeddings_scale": ("model",),
    "up/kernel": (None, "model"),
    "up/kernel_scale": ("model",),
    "down/kernel": ("model", None),
}
GROUPED = {
    "tokens/embeddings": ("model", None),
    "tokens/embeddings_scale": ("model", None),
    "tokens/embeddings_zero": ("model", None),
    "up/kernel": (None, "model"),
    "up/kernel_scale": (None, "model"),
    "up/kernel_zero": (None, "model"),
    "down/kernel": ("model", None),
    "down/g_idx": ("model",),
}
QUERY_GROUPED = {
    **QUERY_INT4,
    "query/kernel_scale": (None, "model"),
    "query/kernel_zero": (None, "model"),
    "output/g_idx": ("model",),
}
COLUMNS = {
    "tokens/embeddings": (None, "model"),
    "down/kernel": ("model", None),
}
REVERSED = {
    "tokens/reverse_embeddings": (None, "model"),
    "tokens/reverse_embeddings_scale": ("model",),
}
SPLIT = {
    "lora": LORA,
    "int8": {
        "mixed": {**QUANTIZED, **QUERY_INT8},
        "columns": COLUMNS,
        "tied": QUANTIZED,
        "untied": {**QUANTIZED, **REVERSED},
    },
    "int4": {
        "mixed": {**QUANTIZED, **QUERY_INT4},
        "columns": COLUMNS,
        "tied": QUANTIZED,
        "untied": {**QUANTIZED, **REVERSED},
    },
    "int4 in groups": {
        "mixed": {**GROUPED, **QUERY_GROUPED},
        "columns": {
            **COLUMNS,
            "tokens/g_idx": ("model",),
            "down/g_idx": ("model",),
        },
        "tied": GROUPED,
        "untied": {
            **GROUPED,
            "tokens/reverse_embeddings": (None, "model"),
            "tokens/reverse_embeddings_scale": (None, "model"),
            "tokens/reverse_embeddings_zero": (None, "model"),
        },
    },
}
SPLIT["int8, lora"] = {
    name: {**LORA[name], **SPLIT["int8"][name]} for name in SPLIT["int8"]
}
SPLIT["int4 in groups, lora"] = {
    name: {**LORA[name], **SPLIT["int4 in groups"][name]}
    for name in SPLIT["int4 in groups"]
}


def quantize(model, mode):
    config = None
    if mode.startswith("int4"):
        # -1: one scale for each column.
        size = 4 if mode == "int4 in groups" else -1
        config = keras.quantizers.Int4QuantizationConfig(block_size=size)
    # Keras warns of each layer that has nothing to quantize.
    skipped = {"InputLayer"}
    model.quantize(
        mode.split(" ")[0],
        config=config,
        filters=lambda layer: type(layer).__name__ not in skipped,
    )


def enable_lora(model):
    keras.utils.set_random_seed(7)
    for part in model.layers:
        if hasattr(part, "enable_lora"):
            part.enable_lora(RANK)


def change(model, what):
    """Does to a model what a comma-separated list says."""
    for step in what.split(", "):
        if step == "lora":
            enable_lora(model)
        else:
            quantize(model, step)


def run(model, data):
    """Returns a `harness.Run`, the outputs before it in front of its losses."""
    x, y = data
    initial = harness.weights_of(model)
    before = model.predict(x, verbose=0)
    model.compile(keras.optimizers.SGD(0.2), "mse")
    history = model.fit(x, y, batch_size=4, epochs=3, verbose=0)
    return (
        harness.Run(
            initial, history.history["loss"], harness.weights_of(model)
        ),
        before,
    )


@functools.cache
def reference(name, what):
    """The same done to plain Keras on one device, once."""
    harness.assert_plain()
    case = CASES[name]
    model = harness.build(case)
    change(model, what)
    return run(model, case.data())


def assert_alike(model, name, what):
    """The model, changed, gives the numbers of one device."""
    expected, outputs = reference(name, what)
    found, own_outputs = run(model, CASES[name].data())
    assert found.initial.keys() == expected.initial.keys()
    for path, value in found.initial.items():
        np.testing.assert_array_equal(value, expected.initial[path], path)
    assert harness.difference(own_outputs, outputs) <= TOLERANCE
    np.testing.assert_allclose(found.losses, expected.losses, rtol=TOLERANCE)
    differences = harness.differences(found, expected)
    assert max(differences.values()) <= TOLERANCE, differences
    for path, value in found.weights.items():
        moved = harness.difference(value, found.initial[path])
        if path.endswith(("lora_kernel_b", "lora_embeddings_b")):
            # The other factor's gradient is zero at first.
            assert moved >= 100 * TOLERANCE, path
        elif not path.endswith(("bias", "_a")):
            assert moved == 0 or "reverse" in path, path


def sharded(name, shape):
    """Returns the model, built under a layout map; its scope is left."""
    case = CASES[name]
    parallel = harness.model_parallel(case.layouts, shape)
    with parallel.scope():
        return harness.build(case)


def assert_split(model, expected):
    """What the live arrays show, and that each device holds its part."""
    report = distribution.describe(model)
    found = {
        row.path: row.axes
        for row in report.rows
        if row.role == "weight" and any(row.axes)
    }
    biases = {path for path in found if path.endswith("bias")}
    assert {p: a for p, a in found.items() if p not in biases} == expected
    count = distribution.get_device_count()
    for row in report.rows:
        if row.path in found:
            count = len(row.device_bytes)
            assert set(row.device_bytes.values()) == {row.bytes // count}
        elif row.role == "weight":
            assert row.why, row.path


NAMES = [
    (what, name)
    for what, by_name in SPLIT.items()
    for name in by_name
    if name == "mixed" or ", " not in what
]


@SHAPES
@pytest.mark.parametrize(("what", "name"), NAMES)
def test_after_sharding(what, name, shape):
    if name != "mixed" and shape != harness.fitted((1, 4)):
        pytest.skip("one mesh is enough")
    reference(name, what)
    model = sharded(name, shape)
    change(model, what)
    assert_split(model, SPLIT[what][name])
    assert_alike(model, name, what)
    assert_split(model, SPLIT[what][name])


def planned(name, shape):
    return distribution.plan_sharding(
        CASES[name].build, harness.mesh(shape)
    ).distribution()


def provisional(name, shape):
    return distribution.TensorParallel(harness.mesh(shape))


def moved(make):
    """A way to shard a model that was built on one device."""

    def shard(name, shape):
        model = harness.build(CASES[name])
        return make(model, name, shape)

    return shard


def built(make):
    """A way to shard a model from birth; its scope is left."""

    def shard(name, shape):
        with make(name, shape).scope():
            return harness.build(CASES[name])

    return shard


def used(make):
    """The same, after the first use, by which it is planned."""

    def shard(name, shape):
        model = built(make)(name, shape)
        model.predict(CASES[name].data()[0], verbose=0)
        return model

    return shard


WAYS = {
    "planned": built(planned),
    "provisional": built(provisional),
    "provisional, used": used(provisional),
    "distribute_model": moved(
        lambda model, name, shape: distribution.distribute_model(
            model, harness.model_parallel(CASES[name].layouts, shape)
        )
    ),
    "TensorParallelKeras": moved(
        lambda model, name, shape: keras_tp.TensorParallelKeras(
            model, world_size=shape[1]
        )
    ),
}


@pytest.mark.parametrize("what", ["lora", "int8", "int4 in groups"])
@pytest.mark.parametrize("way", WAYS)
def test_ways_to_shard(way, what):
    """A plan's kernels are split, and what is added to them after it too."""
    shape = harness.fitted((1, 4))
    reference("mixed", what)
    model = WAYS[way]("mixed", shape)
    change(model, what)
    assert_alike(model, "mixed", what)
    split = split_axes(model)
    for path, axes in SPLIT[what]["mixed"].items():
        # A plan may split the table along its columns.
        if not path.startswith("tokens/"):
            assert split[path] == axes, path
    assert any(path.startswith("tokens/") for path in split)


def split_axes(model):
    return {
        row.path: row.axes
        for row in distribution.describe(model).rows
        if row.role == "weight" and any(row.axes)
    }


@pytest.mark.parametrize("what", SPLIT)
def test_before_sharding(what):
    """A plan of a model that has them already."""
    shape = harness.fitted((1, 4))
    reference("mixed", what)

    def build():
        model = harness.build(CASES["mixed"])
        change(model, what)
        return model

    plan = distribution.plan_sharding(build, harness.mesh(shape))
    with plan.distribution().scope():
        model = build()
    assert_alike(model, "mixed", what)
    split = split_axes(model)
    assert split == {r.path: r.axes for r in plan.variables if any(r.axes)}
    for path, axes in SPLIT[what]["mixed"].items():
        if not path.startswith("tokens/"):
            assert split[path] == axes, path


@pytest.mark.parametrize("what", ["int8", "int4"])
@pytest.mark.parametrize("way", ["distribute_model", "provisional, used"])
def test_the_old_kernels_are_gone(way, what):
    model = WAYS[way]("mixed", harness.fitted((1, 4)))
    kernels = ("tokens", "up", "down", "query", "output")
    held = []
    for name in kernels:
        part = model.get_layer(name)
        kernel = part._embeddings if name == "tokens" else part._kernel
        held += [weakref.ref(kernel), weakref.ref(kernel._value)]
        del part, kernel
    assert all(ref() is not None for ref in held)
    change(model, what)
    gc.collect()
    assert [ref() for ref in held] == [None] * len(held)


def pair(units, first=None):
    """A column and a row, behind a layer or none."""
    keras.utils.set_random_seed(1)
    inputs = keras.Input((WIDTH,))
    x = inputs if first is None else first(inputs)
    x = layer(layers.Dense, units, activation="relu", name="up")(x)
    return keras.Model(inputs, layer(layers.Dense, 5, name="down")(x))


def counted(model, x, y=None):
    found = distribution.count_collectives(model, x, y)
    return {name: pair for name, pair in found.items() if pair[0]}


@SHAPES
def test_what_a_pair_with_lora_communicates(shape):
    """Its sums, and those of the gradients of the factors that are whole."""
    with harness.model_parallel(PAIR, shape).scope():
        model = pair(INNER, layer(layers.Dense, 10, name="open"))
    enable_lora(model)
    model.compile("sgd", "mse")
    x, y = np.ones((4, WIDTH), "float32"), np.ones((4, 5), "float32")
    activations = 4 * (5 + 10) * 4
    factors = (10 * RANK + RANK * 5) * 4
    assert counted(model, x, y) == {"all_reduce": (4, activations + factors)}
    assert counted(model, x) == {"all_reduce": (1, 4 * 5 * 4)}


@SHAPES
@pytest.mark.parametrize("what", SPLIT)
def test_nothing_is_gathered(what, shape):
    model = sharded("mixed", shape)
    change(model, what)
    model.compile("sgd", "mse")
    x, y = CASES["mixed"].data()
    assert set(counted(model, x)) == {"all_reduce"}
    assert set(counted(model, x, y)) == {"all_reduce"}


def test_a_map_that_names_a_factor_wins():
    named = {
        "up/lora_kernel_a": ("model", None),
        "up/lora_kernel_b": (None, None),
    }
    parallel = harness.model_parallel(
        {**PAIR, **named}, harness.fitted((1, 2)), strict=False
    )
    with parallel.scope():
        model = pair(INNER)
    enable_lora(model)
    split = split_axes(model)
    assert split["up/lora_kernel_a"] == ("model", None)
    assert "up/lora_kernel_b" not in split
    assert split["down/lora_kernel_a"] == ("model", None)


def outputs(model):
    x = np.random.default_rng(3).standard_normal((4, WIDTH), "float32")
    return model.predict(x, verbose=0)


def test_bytes_that_do_not_divide():
    """int4 packs two columns in a byte, and 2 devices cannot share 3 bytes."""
    shape = harness.fitted((1, 2))
    units = 3 * shape[1]
    plain = pair(units)
    quantize(plain, "int4")
    expected = outputs(plain)
    with harness.model_parallel(PAIR, shape).scope():
        model = pair(units)
    with pytest.warns(UserWarning, match=r"'up/kernel'.* does not divide by"):
        quantize(model, "int4")
    report = distribution.describe(model)
    assert "in pairs" in report["up/kernel"].why
    assert "'up/kernel' is replicated" in report["up/kernel_scale"].why
    # Not packed along the dim that is split.
    assert split_axes(model)["down/kernel"] == ("model", None)
    assert harness.difference(outputs(model), expected) <= TOLERANCE


def turned():
    """Its kernel has the dim that is summed over behind the other."""
    keras.utils.set_random_seed(1)
    inputs = keras.Input((WIDTH,))
    x = layers.EinsumDense("ab,cb->ac", INNER, name="up")(inputs)
    return keras.Model(inputs, layer(layers.Dense, 5, name="down")(x))


@pytest.mark.parametrize("mode", ["int8", "int4"])
def test_a_kernel_that_int4_regroups(mode):
    plain = turned()
    quantize(plain, mode)
    expected = outputs(plain)
    layouts = {"up/kernel": ("model", None), "down/kernel": ("model", None)}
    shape = harness.fitted((1, 2))
    with harness.model_parallel(layouts, shape).scope():
        model = turned()
    if mode == "int4":
        with pytest.warns(UserWarning, match="'up/kernel'.* are regrouped"):
            quantize(model, mode)
        assert "regrouped" in distribution.describe(model)["up/kernel"].why
    else:
        quantize(model, mode)
        split = split_axes(model)
        assert split["up/kernel"] == ("model", None)
        assert split["up/kernel_scale"][-1] == "model"
    assert harness.difference(outputs(model), expected) <= TOLERANCE


def test_a_mode_whose_layouts_are_not_known():
    config = keras.quantizers.GPTQConfig(
        dataset=None, tokenizer=None, weight_bits=8, group_size=-1
    )
    shape = harness.fitted((1, 2))
    with harness.model_parallel(PAIR, shape).scope():
        model = pair(INNER)
    expected = outputs(model)
    with pytest.warns(UserWarning, match="a kernel in mode 'gptq'"):
        model.get_layer("up").quantize("gptq", config=config)
    # Until it is calibrated the layer computes as before.
    assert harness.difference(outputs(model), expected) == 0


def test_a_plain_layer_stays_plain():
    """Where a distribution was set after a model was built."""
    model = pair(INNER)
    with harness.model_parallel(PAIR, harness.fitted((1, 2))).scope():
        model.get_layer("up").enable_lora(RANK)
        with pytest.raises(ValueError, match="before the distribution was set"):
            outputs(model)
    outputs(model)


def test_a_file_of_what_was_quantized(tmp_path):
    model = sharded("mixed", harness.fitted((1, 2)))
    change(model, "int4 in groups")
    x = CASES["mixed"].data()[0]
    expected = model.predict(x, verbose=0)
    model.save(tmp_path / "model.keras")
    own = keras.models.load_model(tmp_path / "model.keras")
    assert distribution.distribution() is None
    assert harness.difference(own.predict(x, verbose=0), expected) <= TOLERANCE


# How a layer is changed that nobody has called, and what is done with it then.
CHANGES = {
    "int8": lambda up: up.quantize("int8"),
    "int4": lambda up: up.quantize(
        config=keras.quantizers.Int4QuantizationConfig(block_size=4)
    ),
    "float8": lambda up: up.quantize("float8"),
    "lora": lambda up: up.enable_lora(RANK),
    "int8, lora": lambda up: (up.quantize("int8"), up.enable_lora(RANK)),
}


def pair_built_by_shape(how):
    keras.utils.set_random_seed(1)
    up = layer(layers.Dense, INNER, activation="relu", name="up")
    up.build((None, WIDTH))
    CHANGES[how](up)
    down = layer(layers.Dense, WIDTH, name="down")
    return keras.Sequential([up, down])


def called_and_trained(model):
    rng = np.random.default_rng(3)
    x = rng.standard_normal((4, WIDTH), "float32")
    first = keras.ops.convert_to_numpy(model.layers[0](x))
    model.compile(keras.optimizers.SGD(0.1), "mse")
    losses = model.fit(x, x, batch_size=4, epochs=2, verbose=0)
    return [first, losses.history["loss"], model.predict(x, verbose=0)]


@pytest.mark.parametrize("how", CHANGES)
def test_a_layer_that_was_built_by_its_shape_only(how):
    expected = called_and_trained(pair_built_by_shape(how))
    mesh = harness.mesh(harness.fitted((1, 2)))
    distribution.set_distribution(distribution.TensorParallel(mesh))
    model = pair_built_by_shape(how)
    for one, other in zip(called_and_trained(model), expected):
        assert harness.difference(one, other) <= TOLERANCE
    assert split_axes(model)["up/kernel"] == (None, "model")


def test_a_model_of_one_layer_that_is_quantized_before_it_is_used():
    """Each variable that is added is one of the model's at once."""

    def used():
        keras.utils.set_random_seed(1)
        model = keras.Sequential([layer(layers.Dense, INNER, name="up")])
        model.build((None, WIDTH))
        model.quantize("float8")
        return model.predict(np.ones((4, WIDTH), "float32"), verbose=0)

    expected = used()
    mesh = harness.mesh(harness.fitted((1, 2)))
    distribution.set_distribution(distribution.TensorParallel(mesh))
    assert harness.difference(used(), expected) <= TOLERANCE
