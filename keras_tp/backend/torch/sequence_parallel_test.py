"""Sequence parallelism on several processes: numbers, collectives, memory."""

import keras
import numpy as np
import pytest
from keras import layers

if keras.config.backend() != "torch":
    pytest.skip("the torch backend", allow_module_level=True)

from keras_tp.backend.torch import processes

if processes.world_size() < 2:
    pytest.skip("needs several processes", allow_module_level=True)

import torch
from torch.distributed.tensor import Shard

import keras_tp
from keras_tp import distribution
from keras_tp.backend import sequence_parallel as shared
from keras_tp.backend.torch import compiling
from keras_tp.backend.torch import sequence_parallel
from keras_tp.backend.torch.collective_counter import CollectiveCounter
from keras_tp.distribution.tensor_layout import TensorLayout

BATCH, LENGTH, WIDTH, HEADS, WORDS = 4, 16, 32, 4, 64
ACTIVATION = BATCH * LENGTH * WIDTH * 4
# Pattern -> the axes of a layout, and whether it has the flag.
LAYOUTS = {
    "lookup/(reverse_)?embeddings": (("model", None), True),
    ".*(query|key|value)/kernel": ((None, "model", None), True),
    ".*(query|key|value)/bias": (("model", None), False),
    ".*attention_output/kernel": (("model", None, None), True),
    ".*up.*/kernel": ((None, "model"), True),
    ".*up.*/bias": (("model",), False),
    ".*down.*/kernel": (("model", None), True),
}
RNG = np.random.default_rng(0)
IDS = RNG.integers(0, WORDS, (BATCH, LENGTH)).astype("int32")
TARGETS = RNG.normal(size=(BATCH, LENGTH, WIDTH)).astype("float32")
VECTORS = RNG.normal(size=(BATCH, LENGTH, WIDTH)).astype("float32")


pytestmark = pytest.mark.filterwarnings("ignore:The pattern")


@pytest.fixture(autouse=True)
def reset():
    shared._warned.clear()
    yield
    distribution.set_distribution(None)
    keras_tp.uninstall()
    keras.utils.clear_session()


def distributed(flagged=True, data=1):
    """Returns a `ModelParallel` over all processes."""
    count = processes.world_size()
    if count // data < 2:
        pytest.skip("needs more processes")
    mesh = distribution.DeviceMesh((data, count // data), ["batch", "model"])
    layout_map = distribution.LayoutMap(mesh)
    for pattern, (axes, has_flag) in LAYOUTS.items():
        layout_map[pattern] = TensorLayout(axes, mesh)
        layout_map[pattern].sequence_parallel = has_flag and flagged
    return distribution.ModelParallel(
        layout_map=layout_map, batch_dim_name="batch"
    )


def random_biases(model):
    rng = np.random.default_rng(3)
    for weight in model.trainable_variables:
        if len(weight.shape) == 1 or "bias" in weight.path:
            weight.assign(1 + 0.1 * rng.normal(size=weight.shape))


def blocks(count=2, dropout=0.0):
    keras.utils.set_random_seed(1)
    inputs = keras.Input((LENGTH,), dtype="int32")
    x = layers.Embedding(WORDS, WIDTH, name="lookup")(inputs)
    for i in range(count):
        h = layers.LayerNormalization(name=f"norm_a{i}")(x)
        attention = layers.MultiHeadAttention(
            HEADS, WIDTH // HEADS, name=f"attention_{i}"
        )
        h = attention(h, h, use_causal_mask=True)
        x = x + layers.Dropout(dropout, seed=i)(h)
        h = layers.LayerNormalization(name=f"norm_b{i}")(x)
        h = layers.Dense(4 * WIDTH, activation="gelu", name=f"up_{i}")(h)
        x = x + layers.Dense(WIDTH, name=f"down_{i}")(h)
    return keras.Model(inputs, x)


def train(build, x=IDS, y=TARGETS, steps=3, loss="mse", **arguments):
    """Returns a trained model, its outputs before, losses and weights."""
    model = build()
    random_biases(model)
    optimizer = keras.optimizers.SGD(
        0.01, gradient_accumulation_steps=arguments.pop("accumulation", None)
    )
    model.compile(optimizer, loss, **arguments)
    before = model.predict(x, verbose=0)
    losses = [float(model.train_on_batch(x, y)) for _ in range(steps)]
    return model, before, losses, [w.numpy() for w in model.weights]


def check(build, data=1, tolerance=1e-5, **arguments):
    """Compares training with one device; returns the collectives of a step."""
    x, y = arguments.get("x", IDS), arguments.get("y", TARGETS)
    _, *expected = train(build, **dict(arguments))
    with distributed(data=data).scope():
        model, *found = train(build, **dict(arguments))
        counted = distribution.count_collectives(model, x, y)
    for a, b in zip(found, expected):
        for one, other in zip(a, b):
            np.testing.assert_allclose(
                one, other, rtol=tolerance, atol=tolerance
            )
    return {kind: pair for kind, pair in counted.items() if pair[0]}


@pytest.mark.parametrize("data", [1, 2])
def test_collectives_and_numbers_of_two_blocks(data):
    counted = check(blocks, data)
    size = processes.world_size() // data
    own = ACTIVATION // data
    # Two columns and two rows in each block, and the lookup. Backward, they
    # change places.
    assert counted["all_gather"] == (9, 9 * own)
    assert counted["reduce_scatter"] == (9, 9 * own // size)
    assert set(counted) == {"all_gather", "reduce_scatter", "all_reduce"}
    reduced, size = counted["all_reduce"]
    if data == 1:
        # The gradients of norms and row biases, and the loss.
        assert (reduced, size) == (13, 12 * WIDTH * 4 + 4)
    else:
        # One for each variable, and the loss.
        assert reduced == 2 * 16 + 1 + 1


def test_without_the_flag_sums_are_all_reduced():
    with distributed(flagged=False).scope():
        model, *_ = train(blocks)
        counted = distribution.count_collectives(model, IDS, TARGETS)
    assert counted["all_reduce"] == (9, 9 * ACTIVATION)
    assert counted["all_gather"] == counted["reduce_scatter"] == (0, 0)


def test_activations_between_are_split():
    with distributed().scope():
        model = blocks(1)
        taps = keras.Model(
            model.input, [layer.output for layer in model.layers]
        )
        outputs = dict(zip((x.name for x in model.layers), taps(IDS)))
    for name in ("lookup", "norm_a0", "attention_0", "norm_b0", "down_0"):
        assert outputs[name].placements == (Shard(1),), name
    assert outputs["up_0"].placements == (Shard(2),)


def test_dropout_draws_the_numbers_of_one_device():
    check(lambda: blocks(1, dropout=0.4))


def test_an_unseeded_dropout():
    def build():
        keras.utils.set_random_seed(1)
        x = inputs = keras.Input((LENGTH, WIDTH))
        x = layers.Dense(2 * WIDTH, name="up")(x)
        x = layers.Dropout(0.5)(layers.Dense(WIDTH, name="down")(x))
        return keras.Model(inputs, x)

    check(build, x=VECTORS)


HEADS_OF_MODELS = {
    "first": lambda x: x[:, 0],
    "last": lambda x: x[:, -1],
    "middle": lambda x: x[:, 3:9],
    "flatten": layers.Flatten(),
    "average": lambda x: layers.GlobalAveragePooling1D()(x),
    "max": lambda x: layers.GlobalMaxPooling1D()(x),
    "rows": lambda x: keras.ops.reshape(x, (-1, WIDTH)),
    "swapped": lambda x: layers.Permute((2, 1))(x),
    "flipped": lambda x: keras.ops.flip(x, axis=1),
    "cumsum": lambda x: keras.ops.cumsum(x, axis=1),
    "softmax": lambda x: keras.ops.softmax(x, axis=1),
    "batch_norm": lambda x: layers.BatchNormalization()(x),
    "conv": lambda x: layers.Conv1D(5, 3, padding="same")(x),
    "lstm": lambda x: layers.LSTM(6)(x),
    "concatenated": lambda x: keras.ops.concatenate([x[:, :3], x], axis=1),
    "padded": lambda x: layers.ZeroPadding1D(2)(x),
    "dense": lambda x: layers.Dense(7, name="whole")(x),
    "rms": lambda x: layers.RMSNormalization()(x),
    "heads": lambda x: keras.ops.reshape(x, (-1, LENGTH, HEADS, 8)),
}


@pytest.mark.parametrize("head", HEADS_OF_MODELS)
def test_what_reads_a_split_sequence(head):
    def build():
        keras.utils.set_random_seed(1)
        inputs = keras.Input((LENGTH, WIDTH))
        x = layers.Dense(2 * WIDTH, name="up", activation="tanh")(inputs)
        x = layers.Dense(WIDTH, name="down")(x)
        return keras.Model(inputs, HEADS_OF_MODELS[head](x))

    y = np.random.default_rng(5).normal(size=build()(VECTORS).shape)
    check(build, x=VECTORS, y=y.astype("float32"))


def test_a_masked_loss_of_classes():
    def build():
        keras.utils.set_random_seed(1)
        x = inputs = keras.Input((LENGTH,), dtype="int32")
        x = layers.Embedding(WORDS, WIDTH, mask_zero=True, name="lookup")(x)
        x = layers.Dense(2 * WIDTH, name="up", activation="tanh")(x)
        x = layers.Dense(WIDTH, name="down")(x)
        return keras.Model(inputs, layers.Dense(WORDS, name="whole")(x))

    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    check(build, y=IDS, loss=loss)


def language_model(tied=True, **arguments):
    keras.utils.set_random_seed(1)
    inputs = keras.Input((LENGTH,), dtype="int32")
    lookup = layers.ReversibleEmbedding(
        WORDS, WIDTH, tie_weights=tied, name="lookup"
    )
    x = lookup(inputs)
    h = layers.RMSNormalization(name="norm")(x)
    gate = layers.Dense(2 * WIDTH, activation="silu", name="up_gate")(h)
    h = gate * layers.Dense(2 * WIDTH, name="up")(h)
    x = x + layers.Dense(WIDTH, name="down")(h)
    x = layers.RMSNormalization(name="last")(x)
    return keras.Model(inputs, lookup(x, reverse=True))


CLASSES = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


@pytest.mark.parametrize("data", [1, 2])
@pytest.mark.parametrize("tied", [True, False])
def test_the_head_is_a_column(tied, data):
    def build():
        model = language_model(tied)
        if not tied:
            # The untied table has one column for each word.
            assert model.get_layer("lookup").reverse_embeddings.shape[0] == 32
        return model

    if not tied:
        LAYOUTS["lookup/embeddings"] = (("model", None), True)
        LAYOUTS["lookup/reverse_embeddings"] = ((None, "model"), True)
    try:
        counted = check(build, data, y=IDS, loss=CLASSES)
    finally:
        LAYOUTS.pop("lookup/embeddings", None)
        LAYOUTS.pop("lookup/reverse_embeddings", None)
    # Lookup and row; gate and up share one gather, and the head has one.
    assert counted["all_gather"][0] == counted["reduce_scatter"][0] == 4
    sizes = counted["all_gather"][1], counted["reduce_scatter"][1]
    count = processes.world_size() // data
    assert sizes == (4 * ACTIVATION // data, 4 * ACTIVATION // data // count)


def test_a_gather_is_shared_without_gradients():
    with distributed().scope():
        model = blocks()
        counted = distribution.count_collectives(model, IDS)
    assert counted["all_gather"] == (4, 4 * ACTIVATION)
    assert counted["reduce_scatter"][0] == 5


def up(name, **arguments):
    return layers.Dense(2 * WIDTH, use_bias=False, name=name, **arguments)


def split_sequence():
    """Returns a tensor that is split along the sequence."""
    mesh = keras.distribution.distribution().device_mesh
    whole = keras.ops.convert_to_tensor(VECTORS)
    layout = TensorLayout((None, "model", None), mesh)
    return distribution.distribute_tensor(whole, layout)


def gathers_in(function):
    with CollectiveCounter() as counter:
        function()
    return counter.total["all_gather"][0]


def test_a_gathered_input_is_freed():
    with distributed().scope(), torch.no_grad():
        first, second = up("up_1"), up("up_2")
        one, other = split_sequence(), split_sequence()
        assert gathers_in(lambda: (first(one), second(one))) == 1
        held = sequence_parallel.gathered_by(one)
        assert held is not None
        del held
        # Another input takes its place.
        assert gathers_in(lambda: first(other)) == 1
        assert sequence_parallel.gathered_by(one) is None
        assert sequence_parallel.gathered_by(other) is not None
        assert gathers_in(lambda: first(one)) == 1
        # A write makes it out of date.
        one += 1
        assert gathers_in(lambda: first(one)) == 1


def test_gathers_are_shared_across_others_in_training():
    """As a decoder reads the outputs of an encoder in each of its blocks."""
    with distributed().scope():
        columns = [up(f"up_{i}") for i in range(3)]
        one, other = split_sequence(), split_sequence()
        one.requires_grad_()

        def forward():
            y = columns[0](one) + columns[1](other) + columns[2](one)
            return keras.ops.sum(y**2)

        with CollectiveCounter() as counter:
            forward().backward()
    total = counter.total
    assert total["all_gather"][0] == 2
    assert total["reduce_scatter"][0] == 1
    assert one.grad.placements == (Shard(1),)


def test_no_gather_without_gradients_serves_training():
    with distributed().scope():
        column, x = up("up"), split_sequence().requires_grad_()
        with torch.no_grad():
            column(x)
        keras.ops.sum(column(x) ** 2).backward()
    assert x.grad is not None


@pytest.mark.parametrize("data", [1, 2])
@pytest.mark.parametrize(
    "scope",
    [
        dict(mode="full"),
        dict(mode="activations"),
        dict(
            mode="list_of_layers",
            layer_names=["attention_0", "query", "value", "down_1", "lookup"],
        ),
    ],
    ids=lambda scope: scope["mode"],
)
def test_rematerialization(scope, data):
    def build():
        with keras.RematScope(**scope):
            return blocks()

    counted = check(build, data)
    assert counted["reduce_scatter"][0] == 9
    # Inputs are gathered again, and not kept. In mode "full", the model is
    # computed again, and then each layer in it.
    again = {"full": 7, "activations": 0, "list_of_layers": 1}[scope["mode"]]
    assert counted["all_gather"][0] == 9 + again


class Again(layers.Layer):
    """A block in one function that is computed again."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.norm = layers.LayerNormalization(name="norm")
        self.up = layers.Dense(2 * WIDTH, activation="gelu", name="up")
        self.down = layers.Dense(WIDTH, name="down")

    def build(self, shape):
        self.norm.build(shape)
        self.up.build(shape)
        self.down.build((*shape[:-1], 2 * WIDTH))

    def call(self, x):
        return keras.remat(lambda x: x + self.down(self.up(self.norm(x))))(x)


def test_a_function_that_is_computed_again():
    def build():
        keras.utils.set_random_seed(1)
        inputs = keras.Input((LENGTH,), dtype="int32")
        x = layers.Embedding(WORDS, WIDTH, name="lookup")(inputs)
        return keras.Model(inputs, Again()(Again()(x)))

    counted = check(build)
    assert counted["reduce_scatter"][0] == 5


def test_a_sequence_that_does_not_divide():
    length = 2 * processes.world_size() + 1
    x, y = VECTORS[:, :length], TARGETS[:, :length]

    def build():
        keras.utils.set_random_seed(1)
        inputs = keras.Input((None, WIDTH))
        h = layers.Dense(2 * WIDTH, name="up", activation="tanh")(inputs)
        return keras.Model(inputs, layers.Dense(WIDTH, name="down")(h))

    with pytest.warns(UserWarning, match="does not divide"):
        counted = check(build, x=x, y=y)
    assert set(counted) == {"all_reduce"}
    # A sequence of one position, as with a cache, has no warning.
    shared._warned.clear()
    check(build, x=x[:, :1], y=y[:, :1])
    assert not shared._warned


def test_gradient_accumulation():
    check(lambda: blocks(1), accumulation=2, steps=4)


@pytest.mark.parametrize("dtype", ["mixed_bfloat16", "bfloat16"])
def test_half_precision(dtype):
    keras.config.set_dtype_policy(dtype)
    try:
        counted = check(lambda: blocks(1), tolerance=0.1)
    finally:
        keras.config.set_dtype_policy("float32")
    assert counted["all_gather"][0] == counted["reduce_scatter"][0] == 5


def test_lora():
    def build():
        model = blocks(1)
        model.get_layer("up_0").enable_lora(2)
        model.get_layer("down_0").enable_lora(2)
        return model

    check(build)


def test_a_compiled_step():
    _, *expected = train(lambda: blocks(1))
    with distributed().scope():
        with pytest.warns(UserWarning, match="jit_compile=False"):
            _, *found = train(lambda: blocks(1), jit_compile=True)
    for a, b in zip(found, expected):
        for one, other in zip(a, b):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_a_step_that_is_compiled_nevertheless(monkeypatch):
    """Its activations are whole: all sums are all-reduced."""

    def perceptron():
        keras.utils.set_random_seed(1)
        inputs = keras.Input((LENGTH,), dtype="int32")
        x = layers.Embedding(WORDS, WIDTH, name="lookup")(inputs)
        h = layers.Dense(2 * WIDTH, name="up", activation="tanh")(x)
        return keras.Model(inputs, x + layers.Dense(WIDTH, name="down")(h))

    _, *expected = train(perceptron)
    monkeypatch.setattr(compiling, "_why_eager", lambda model: None)
    torch._dynamo.reset()
    with distributed().scope():
        _, *found = train(perceptron, jit_compile=True)
    for a, b in zip(found, expected):
        for one, other in zip(a, b):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)
