"""Activations split along the sequence: numbers and collectives."""

import keras
import keras_hub
import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from tensorflow.experimental import dtensor

from keras_tp import distribution as dist
from keras_tp.backend import sequence_parallel
from keras_tp.backend.tensorflow import placement
from keras_tp.distribution.tensor_layout import TensorLayout

BATCH, LENGTH, WIDTH, HEADS, WORDS = 4, 8, 16, 4, 24
ACTIVATION = BATCH * LENGTH * WIDTH * 4
RNG = np.random.default_rng(0)
TOKENS = RNG.integers(0, WORDS, (BATCH, LENGTH)).astype("int32")
MESHES = [(1, 2), (2, 2), (1, 4)]
LAYOUTS = {
    ".*(lookup|token_embedding)/embeddings": ("model", None),
    ".*(query|key|value)/kernel": (None, "model", None),
    ".*(query|key|value)/bias": ("model", None),
    ".*attention_output/kernel": ("model", None, None),
    ".*(up|gate|intermediate)[^/]*/kernel": (None, "model"),
    ".*(up|gate|intermediate)[^/]*/bias": ("model",),
    ".*(down|output_dense)[^/]*/kernel": ("model", None),
    ".*token_embedding/reverse_embeddings": (None, "model"),
}
pytestmark = pytest.mark.filterwarnings("ignore:The pattern")


@pytest.fixture(autouse=True)
def warn_again():
    sequence_parallel._warned.clear()


def on_devices(shape, flag=True):
    count = int(np.prod(shape))
    mesh = dist.DeviceMesh(
        shape, ["batch", "model"], dist.list_devices()[:count]
    )
    layout_map = dist.LayoutMap(mesh)
    for pattern, axes in LAYOUTS.items():
        layout_map[pattern] = TensorLayout(axes, mesh)
        layout_map[pattern].sequence_parallel = flag
    return dist.ModelParallel(layout_map=layout_map, batch_dim_name="batch")


def dense(units, name, **kwargs):
    return layers.Dense(
        units, name=name, bias_initializer="random_normal", **kwargs
    )


def attention(x, index):
    h = layers.LayerNormalization(name=f"norm_a{index}")(x)
    layer = layers.MultiHeadAttention(
        HEADS, WIDTH // HEADS, bias_initializer="random_normal"
    )
    return x + layer(h, h, use_causal_mask=True)


def feedforward(x, index, dropout=0.0):
    h = layers.LayerNormalization(name=f"norm_b{index}")(x)
    h = dense(2 * WIDTH, f"up_{index}", activation="gelu")(h)
    h = dense(WIDTH, f"down_{index}")(h)
    return x + layers.Dropout(dropout, seed=index)(h)


def tokens_to(end, lookup=None, length=LENGTH):
    """Returns a model that looks up tokens."""
    inputs = keras.Input((length,), dtype="int32")
    lookup = lookup or layers.Embedding(WORDS, WIDTH, name="lookup")
    return keras.Model(inputs, end(lookup(inputs)))


def blocks():
    def two(x):
        for i in range(2):
            x = feedforward(attention(x, i), i)
        return x

    return tokens_to(two)


def small(dropout=0.0, length=LENGTH):
    return tokens_to(lambda x: feedforward(x, 0, dropout), length=length)


def train(build, tokens=TOKENS, **kwargs):
    """Returns outputs, losses and weights, and the collectives of a step."""
    keras.utils.clear_session()
    keras.utils.set_random_seed(1)
    model = build()
    model.compile(keras.optimizers.SGD(0.01, momentum=0.9), "mse", **kwargs)
    outputs = model.predict(tokens, verbose=0, batch_size=BATCH)
    y = np.random.default_rng(1).normal(size=outputs.shape)
    y = y.astype("float32")
    losses = [model.train_on_batch(tokens, y) for _ in range(3)]
    counted = {}
    if dist.distribution() is not None:
        counted = dist.count_collectives(model, tokens, y)
    weights = [np.array(w.numpy()) for w in model.variables]
    return [outputs, losses, weights], counted


def check(build, shape=(1, 2), flag=True, **kwargs):
    """Compares training with one device; returns the collectives of a step."""
    expected, _ = train(build, **kwargs)
    with on_devices(shape, flag).scope():
        found, counted = train(build, **kwargs)
    assert_equal(found, expected)
    return counted


def assert_equal(found, expected):
    pairs = zip(keras.tree.flatten(found), keras.tree.flatten(expected))
    for a, b in pairs:
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shape", MESHES)
def test_collectives_of_two_blocks(shape):
    """Two columns and two rows in a block, and the lookup.

    Backward, gathers and scatters change places.
    """
    counted = check(blocks, shape)
    own = ACTIVATION // shape[0]
    assert counted["all_gather"] == (9, 9 * own)
    assert counted["reduce_scatter"] == (9, 9 * own // shape[1])
    if shape[0] == 1:
        # The scales and biases of four norms, four biases, and the loss.
        assert counted["all_reduce"] == (13, (8 + 4) * WIDTH * 4 + 4)


def test_nothing_changes_without_the_flag():
    counted = check(blocks, flag=False)
    assert counted["all_reduce"] == (9, 9 * ACTIVATION)
    assert counted["all_gather"] == counted["reduce_scatter"] == (0, 0)


def test_dropout_draws_the_numbers_of_one_device():
    check(lambda: small(dropout=0.3), (1, 4))


def test_the_result_is_split_along_the_sequence():
    distribution = on_devices((1, 2))
    with distribution.scope():
        model = small(length=None)
        mesh = distribution.device_mesh.backend_mesh
        with placement.on_mesh(mesh, "batch"):
            tokens = placement.replicated(TOKENS)
            split = tf.function(model)(tokens)
            one = tf.function(model)(tokens[:, :1])
    specs = dtensor.fetch_layout(split).sharding_specs
    assert specs == [dtensor.UNSHARDED, "model", dtensor.UNSHARDED]
    assert dtensor.fetch_layout(one).is_fully_replicated()


def shifted(x):
    return keras.ops.concatenate([x[:, 1:], x[:, :1]], 1)


ENDS = {
    "first": lambda x: dense(3, "head")(x[:, 0]),
    "last": lambda x: dense(3, "head")(x[:, -1]),
    "flatten": lambda x: dense(3, "head")(layers.Flatten()(x)),
    "mean": lambda x: dense(3, "head")(layers.GlobalAveragePooling1D()(x)),
    "max": lambda x: dense(3, "head")(layers.GlobalMaxPooling1D()(x)),
    "shifted": lambda x: shifted(x) * keras.ops.flip(x, 1),
    "softmax": lambda x: keras.ops.softmax(x, 1),
    "conv": lambda x: layers.Conv1D(3, 3, padding="same")(x),
    "head": lambda x: dense(3, "head")(x),
}


@pytest.mark.parametrize("end", ENDS)
def test_layers_after_a_split_result(end):
    counted = check(lambda: tokens_to(lambda x: ENDS[end](feedforward(x, 0))))
    assert counted["reduce_scatter"][0] == 3


def test_a_tied_head_is_a_column_product():
    def build():
        lookup = keras_hub.layers.ReversibleEmbedding(
            WORDS, WIDTH, name="lookup"
        )

        def head(x):
            return lookup(layers.LayerNormalization()(x), reverse=True)

        return tokens_to(head, lookup)

    counted = check(build)
    assert counted["all_gather"] == (2, 2 * ACTIVATION)
    assert counted["reduce_scatter"] == (2, ACTIVATION)


def test_products_of_one_input_share_the_gather():
    def gated(x):
        h = layers.LayerNormalization()(x)
        gate = dense(2 * WIDTH, "gate", activation="silu")(h)
        return x + dense(WIDTH, "down")(gate * dense(2 * WIDTH, "up")(h))

    counted = check(lambda: tokens_to(gated))
    assert counted["all_gather"] == (3, 3 * ACTIVATION)
    assert counted["reduce_scatter"] == (3, 3 * ACTIVATION // 2)


def test_low_rank_adapters():
    def build():
        model = small()
        rng = np.random.default_rng(3)
        for name in ("up_0", "down_0"):
            layer = model.get_layer(name)
            layer.enable_lora(2)
            factor = layer.lora_kernel_b
            factor.assign(rng.normal(size=factor.shape))
        return model

    counted = check(build)
    assert counted["reduce_scatter"][0] == 3


class Twice(layers.Layer):
    """Reads a tensor in a function that is computed again, and beside it."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.up = dense(2 * WIDTH, "up", activation="gelu")
        self.down = dense(WIDTH, "down")

    def build(self, shape):
        self.up.build(shape)
        self.down.build((*shape[:-1], 2 * WIDTH))

    def call(self, x):
        def function(x):
            return self.down(self.up(x))

        return keras.remat(function)(x) + function(x)


def test_a_tape_gets_gradients_of_a_gather_before_it():
    def twice(x):
        return x + Twice()(layers.LayerNormalization()(x))

    check(lambda: tokens_to(twice))


def custom_loop(run):
    keras.utils.clear_session()
    keras.utils.set_random_seed(1)
    model = small()
    optimizer = keras.optimizers.SGD(0.01)

    def step(tokens):
        # The tape starts after a first use of the weights.
        first = tf.reduce_mean(model(tokens))
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model(tokens, training=True) ** 2)
        variables = model.trainable_variables
        optimizer.apply(tape.gradient(loss, variables), variables)
        return loss + first

    step = run(step)
    losses = [float(step(tf.constant(TOKENS))) for _ in range(3)]
    return losses, [w.numpy() for w in model.variables]


@pytest.mark.parametrize("run", [tf.function, lambda step: step])
def test_custom_loops(run):
    expected = custom_loop(run)
    with on_devices((1, 2)).scope():
        assert_equal(custom_loop(run), expected)


def fitted():
    keras.utils.clear_session()
    keras.utils.set_random_seed(1)
    model = small()
    model.compile(keras.optimizers.SGD(0.01), "mse")
    rng = np.random.default_rng(4)
    x = rng.integers(0, WORDS, (11, LENGTH))
    y = rng.normal(size=(11, LENGTH, WIDTH))
    history = model.fit(
        x, y, 4, 2, 0, shuffle=False, validation_data=(x[:3], y[:3])
    )
    return history.history, model.predict(x, batch_size=4, verbose=0)


def test_fit_with_a_last_batch_that_does_not_divide():
    expected = fitted()
    with on_devices((2, 2)).scope():
        found = fitted()
    assert_equal(found, expected)


def test_a_length_that_does_not_divide_warns():
    with pytest.warns(UserWarning, match="7 positions does not divide by 2"):
        counted = check(lambda: small(length=None), tokens=TOKENS[:, :7])
    assert counted["reduce_scatter"] == (0, 0)


def generated():
    keras.utils.clear_session()
    keras.utils.set_random_seed(1)
    backbone = keras_hub.models.LlamaBackbone(
        vocabulary_size=WORDS,
        num_layers=1,
        num_query_heads=HEADS,
        num_key_value_heads=HEADS,
        hidden_dim=WIDTH,
        intermediate_dim=2 * WIDTH,
    )
    model = keras_hub.models.LlamaCausalLM(backbone, preprocessor=None)
    model.compile(sampler="greedy")
    mask = np.arange(LENGTH)[None] < [[3]] * BATCH
    return model.generate(
        {"token_ids": TOKENS * mask, "padding_mask": mask.astype("int32")},
        stop_token_ids=None,
    )["token_ids"]


def test_generate_with_a_cache():
    expected = generated()
    with on_devices((1, 2)).scope():
        np.testing.assert_array_equal(generated(), expected)
