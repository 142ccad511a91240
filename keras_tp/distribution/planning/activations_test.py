"""What a plan says that the forward pass keeps for the backward pass.

`benchmarks/activations.py` compares it with XLA's programs for H100.
"""

import contextlib

import keras
import pytest
from keras import layers

from keras_tp.distribution import plan_sharding
from keras_tp.distribution.planning import cost

COUNT = 2
BATCH, LENGTH, WIDTH, HEADS = 4, 6, 16, 4
HALF, FLOAT = 2, 4


def kept(build, dtype="mixed_bfloat16", count=COUNT):
    """Returns the bytes of activations of a model on one device."""
    devices = [f"cpu:{i}" for i in range(count)]
    mesh = keras.distribution.DeviceMesh((count,), ["model"], devices)
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(dtype)
    try:
        plan = plan_sharding(build, mesh)
    finally:
        keras.config.set_dtype_policy(before)
    return plan.memory(BATCH)["activations"]


def feed_forward(activation, rate=0.0):
    """Returns a function that builds a pair of layers."""

    def build():
        x = inputs = keras.Input((WIDTH,))
        x = layers.Dense(4 * WIDTH, activation, name="up")(x)
        x = layers.Dropout(rate)(x)
        return keras.Model(inputs, layers.Dense(WIDTH, name="down")(x))

    return build


# Inputs and outputs, and what both layers make of their kernels.
ENDS = 2 * BATCH * WIDTH * HALF + 2 * 4 * WIDTH**2 * HALF // COUNT
HIDDEN = BATCH * 4 * WIDTH * HALF // COUNT


@pytest.mark.parametrize(
    ("activation", "times"),
    [
        # The input of the second product.
        (None, 1),
        ("relu", 1),
        # And that of the function.
        ("silu", 2),
        # And its derivative, and the error function.
        ("gelu", 4),
    ],
)
def test_inputs_of_products_and_kernels_that_were_cast(activation, times):
    assert kept(feed_forward(activation)) == ENDS + times * HIDDEN


def test_kernels_that_are_not_cast():
    ends = 2 * BATCH * WIDTH * FLOAT
    assert kept(feed_forward(None), "float32") == ends + 2 * HIDDEN


def test_kernels_that_the_backward_pass_gathers_again():
    devices = [f"cpu:{i}" for i in range(4)]
    names = ["batch", "model"]
    mesh = keras.distribution.DeviceMesh((2, 2), names, devices)
    keras.config.set_dtype_policy("mixed_bfloat16")
    try:
        plans = [
            plan_sharding(feed_forward(None), mesh, fully_shard=is_sharded)
            for is_sharded in (False, True)
        ]
    finally:
        keras.config.set_dtype_policy("float32")
    plain, sharded = (plan.memory(BATCH)["activations"] for plan in plans)
    # The backward pass needs the kernel of the first layer for nothing.
    assert plain - sharded == 4 * WIDTH**2 * HALF // COUNT


def test_dropout_keeps_a_byte_of_each_number():
    dropped = kept(feed_forward(None, rate=0.5)) - kept(feed_forward(None))
    assert dropped == HIDDEN // HALF


class WrittenOut(layers.Layer):
    """Attention of operations, as models write it for some backends."""

    def __init__(self, is_biased=False):
        super().__init__()
        self.is_biased = is_biased

    def build(self, shape):
        if self.is_biased:
            shape = (HEADS, shape[1], shape[1])
            self.bias = self.add_weight(shape=shape, name="bias")

    def call(self, query, key, value):
        scores = keras.ops.einsum("btnh,bsnh->bnts", query, key) * 0.5
        if self.is_biased:
            scores = keras.ops.add(scores, self.bias)
        scores = keras.ops.softmax(keras.ops.cast(scores, "float32"))
        scores = keras.ops.cast(scores, self.compute_dtype)
        return keras.ops.einsum("bnts,bsnh->btnh", scores, value)


class OneOperation(layers.Layer):
    def call(self, query, key, value):
        return keras.ops.dot_product_attention(query, key, value)


def attention(layer, length=LENGTH, head=8):
    """Returns a function that builds a model of one attention."""

    def build():
        inputs = keras.Input((length, WIDTH))
        projected = [
            layers.EinsumDense("btd,dnh->btnh", (length, HEADS, head))(inputs)
            for _ in range(3)
        ]
        x = layer()(*projected)
        return keras.Model(
            inputs, layers.EinsumDense("btnh,nhd->btd", (length, WIDTH))(x)
        )

    return build


@pytest.mark.parametrize("dtype", ["mixed_bfloat16", "float32"])
@pytest.mark.parametrize("length", [LENGTH, LENGTH + 1])
def test_all_forms_of_attention_keep_the_same(dtype, length):
    """Backends and models have different forms; plans are the same."""
    one = kept(attention(OneOperation, length), dtype)
    assert kept(attention(WrittenOut, length), dtype) == one


def scores_of(layer, length=LENGTH, **kwargs):
    """Returns the bytes for each score, beside those of one kernel."""
    dtype = kwargs.pop("dtype", "mixed_bfloat16")
    found = kept(attention(layer, length, **kwargs), dtype)
    item = FLOAT if dtype == "float32" else HALF
    projected = 4 * BATCH * length * HEADS * kwargs.get("head", 8) * item
    ends = 2 * BATCH * length * WIDTH * item
    kernels = 4 * WIDTH * HEADS * kwargs.get("head", 8) * HALF
    kernels *= dtype != "float32"
    rest = found - ends - (projected + kernels) // COUNT
    return rest / (BATCH * HEADS * length**2 // COUNT)


def test_scores_of_attention_that_is_no_kernel():
    assert scores_of(OneOperation) == 0
    assert scores_of(OneOperation, dtype="float32") == FLOAT + FLOAT
    # cuDNN's needs an even length, and heads of a multiple of 8.
    assert scores_of(OneOperation, length=LENGTH + 1) == FLOAT + HALF
    assert scores_of(OneOperation, head=12) == FLOAT + HALF


def test_a_learned_bias_is_added_to_scores():
    whole = kept(attention(lambda: WrittenOut(is_biased=True)))
    scores = BATCH * HEADS * LENGTH**2 // COUNT
    assert whole - kept(attention(WrittenOut)) == (FLOAT + HALF) * scores


def test_dropout_of_scores():
    def build(rate):
        inputs = keras.Input((LENGTH, WIDTH))
        attend = layers.MultiHeadAttention(HEADS, 8, dropout=rate)
        return keras.Model(inputs, attend(inputs, inputs))

    scores = BATCH * HEADS * LENGTH**2 // COUNT
    dropped = kept(lambda: build(0.5)) - kept(lambda: build(0.0))
    assert dropped == (2 * HALF + 1) * scores


def test_the_gradient_of_a_table():
    def build():
        inputs = keras.Input((LENGTH,), dtype="int32")
        x = layers.Embedding(64, WIDTH, name="tokens")(inputs)
        return keras.Model(inputs, layers.Dense(WIDTH, name="out")(x))

    rows = BATCH * LENGTH * WIDTH
    kernel = WIDTH**2 * HALF
    # What was looked up, the logits, the table and the kernel. The table has
    # its last layer beside it, so neither is split.
    assert kept(build, count=1) == (
        rows * HALF + rows * HALF + 64 * WIDTH * FLOAT + kernel
    )


class Block(layers.Layer):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.up = layers.Dense(4 * WIDTH, "gelu", name="up")
        self.down = layers.Dense(WIDTH, name="down")

    def build(self, shape):
        self.up.build(shape)
        self.down.build((*shape[:-1], 4 * WIDTH))

    def call(self, x):
        return x + self.down(self.up(x))


def blocks(number, scope=contextlib.nullcontext):
    def build():
        x = inputs = keras.Input((WIDTH,))
        with scope():
            for i in range(number):
                x = Block(name=f"block_{i}")(x)
        return keras.Model(inputs, x)

    return build


def in_list():
    names = [f"block_{i}" for i in range(8)]
    return keras.RematScope("list_of_layers", layer_names=names)


def larger():
    return keras.RematScope("larger_than", output_size_threshold=WIDTH // 2)


def full():
    return keras.RematScope("full")


@pytest.mark.parametrize("scope", [in_list, larger, full])
def test_rematerialization_keeps_the_input_of_a_block(scope):
    few, many = (kept(blocks(n, scope)) for n in (3, 7))
    assert many - few == 4 * BATCH * WIDTH * HALF
    # And what one block keeps while it is computed again.
    assert few > 3 * BATCH * WIDTH * HALF + HIDDEN
    plain = [kept(blocks(n)) for n in (3, 7)]
    assert few < plain[0]
    per_block = BATCH * WIDTH * HALF + 4 * HIDDEN
    assert plain[1] - plain[0] == 4 * (
        per_block + 2 * 4 * WIDTH**2 * HALF // COUNT
    )


class Squared(Block):
    """The gradient of the square needs the sum over the devices."""

    def call(self, x):
        return x + keras.ops.square(self.down(self.up(x)))


@pytest.mark.parametrize(
    ("cls", "scope", "times"),
    [(Squared, in_list, 2), (Block, full, 2), (Squared, full, 2)],
)
def test_rematerialization_keeps_sums(cls, scope, times):
    """In mode "full", the whole model is computed again, and needs each."""

    def build(number):
        x = inputs = keras.Input((WIDTH,))
        with scope():
            for i in range(number):
                x = cls(name=f"block_{i}")(x)
            model = keras.Model(inputs, x)
        return model

    few, many = (kept(lambda n=n: build(n)) for n in (3, 7))
    assert many - few == times * 4 * BATCH * WIDTH * HALF


def test_sizes_of_dims_of_several_tensors():
    from keras_tp.distribution.planning.graph import Graph

    graph = Graph("net", 3, 5)
    query = graph.new_value("result", (3, 5, 2, 8), "float32")
    key = graph.new_value("result", (3, 7, 2, 8), "float32")
    dims = [(query, 0), (query, 2), (query, 1), (key, 1)]
    assert cost.size_of_dims(dims, 6, graph) == cost.Size(6 * 2 * 7, 1, 1)
