import keras
import numpy as np
import pytest
from keras import layers
from keras import ops

from integration_tests import small_models
from keras_tp import distribution
from keras_tp.distribution.planning import planner
from keras_tp.distribution.planning import reasons
from keras_tp.distribution.planning import trace


def mesh(*shape, axis_names=("batch", "model")):
    """Returns a mesh of devices that need not exist."""
    devices = [f"cpu:{i}" for i in range(int(np.prod(shape)))]
    return keras.distribution.DeviceMesh(shape, list(axis_names), devices)


def plan_of(model, count=4, **kwargs):
    return distribution.plan_sharding(model, mesh(1, count), **kwargs)


def split(plan):
    """Returns a dict of the split paths to the dim that is split."""
    return {
        row.path: row.axes.index("model")
        for row in plan.variables
        if "model" in row.axes
    }


def mlp():
    inputs = keras.Input((12,))
    x = layers.Dense(16, activation="relu", name="up")(inputs)
    return keras.Model(inputs, layers.Dense(5, name="down")(x), name="mlp")


PAIR = {"up/kernel": 1, "up/bias": 0, "down/kernel": 0}


@pytest.mark.parametrize("count", [2, 4])
def test_two_layers_are_a_column_and_a_row(count):
    plan = plan_of(mlp, count)
    assert split(plan) == PAIR
    assert plan.collectives(8) == {"all_reduce": (1, 8 * 5 * 4)}


def test_what_goes_with_a_kernel_that_is_split_another_way_says_so():
    inputs = keras.Input((12,))
    x = layers.Dense(16, activation="relu", name="up")(inputs)
    x = layers.Dense(8, activation="relu", name="down")(x)
    plan = plan_of(keras.Model(inputs, layers.Dense(1, name="out")(x)))
    assert split(plan) == PAIR
    why = "goes with dim 1 of 'down/kernel', which is split along dim 0 instead"
    assert plan["down/bias"].why == f"dim 0: {why}"
    assert plan["out/kernel"].why == f"dim 0: {why}"
    assert plan["out/bias"].why == "it has one element"


def test_a_table_of_positions_is_an_embedding():
    class Positions(layers.Layer):
        def build(self, shape):
            self.table = layers.Embedding(20, 12, name="table")
            self.table.build()

        def call(self, x):
            return x + self.table(np.arange(16))

    def model():
        inputs = keras.Input((16, 12))
        x = Positions(name="positions")(inputs)
        x = layers.Dense(16, name="up")(layers.LayerNormalization()(x))
        return keras.Model(inputs, layers.Dense(12, name="down")(x))

    row = plan_of(model)["positions/table/embeddings"]
    assert row.axes == ("model", None)
    assert row.why == "row-parallel embedding: one all-reduce after the lookup"


def test_sums_have_the_dtype_of_computations():
    def half():
        inputs = keras.Input((12,))
        dtype = "mixed_bfloat16"
        x = layers.Dense(16, activation="relu", dtype=dtype, name="up")(inputs)
        outputs = layers.Dense(5, dtype=dtype, name="down")(x)
        return keras.Model(inputs, outputs)

    plan, whole = plan_of(half), plan_of(mlp)
    assert plan.collectives(8) == {"all_reduce": (1, 8 * 5 * 2)}
    memory, of_float32 = plan.memory(8), whole.memory(8)
    assert memory["parameters"] == of_float32["parameters"]
    assert memory["activations"] < of_float32["activations"]


def test_fully_sharding_says_what_stays_whole():
    with pytest.warns(UserWarning, match="leaves 29% of the bytes of 'mlp'"):
        plan = distribution.plan_sharding(mlp, mesh(4, 2), fully_shard=True)
    assert plan["up/kernel"].axes == ("batch", "model")
    row = plan["down/kernel"]
    assert row.axes == ("model", None)
    assert row.why.endswith("no other dim divides by 4, so not over 'batch'")
    # One device along the axis holds all of it anyway.
    plan = distribution.plan_sharding(mlp, mesh(1, 2), fully_shard=True)
    assert not any("no other dim" in row.why for row in plan.variables)


def test_one_device_along_the_axis():
    assert split(plan_of(mlp, 1)) == {}


def test_dims_that_do_not_divide_are_whole_and_named():
    plan = plan_of(mlp, 3)
    assert split(plan) == {}
    assert "16 does not divide by 3" in plan["up/kernel"].why
    assert "by [2, 4, 8, 16]" in plan["up/kernel"].why


def test_a_build_function_leaves_no_trace():
    keras.utils.set_random_seed(3)
    expected = [v.path for v in mlp().weights] + [layers.Dense(1).name]
    drawn = (
        np.random.rand(),
        keras.ops.convert_to_numpy(keras.random.uniform((2,))),
    )
    keras.utils.clear_session()
    keras.utils.set_random_seed(3)
    plan_of(lambda: keras.Sequential([keras.Input((4,)), layers.Dense(2)]))
    found = [v.path for v in mlp().weights] + [layers.Dense(1).name]
    assert found == expected
    assert np.random.rand() == drawn[0]
    again = keras.ops.convert_to_numpy(keras.random.uniform((2,)))
    np.testing.assert_array_equal(again, drawn[1])


def test_a_build_function_allocates_no_weights():
    def build():
        inputs = keras.Input((2**20,))
        x = layers.Dense(2**20, name="up")(inputs)
        return keras.Model(inputs, layers.Dense(8, name="down")(x))

    # 4 TiB.
    plan = plan_of(build)
    assert plan["up/kernel"].nbytes == 2**42
    assert plan.memory(1, optimizer="sgd")["parameters"] < 2**41


def test_a_model_that_exists_keeps_its_variables():
    model = mlp()
    before = model.get_weights()
    names = {id(v) for v in model.weights}
    assert split(plan_of(model)) == PAIR
    assert {id(v) for v in model.weights} == names
    for value, old in zip(model.get_weights(), before):
        np.testing.assert_array_equal(value, old)
    assert model(np.ones((2, 12), "float32")).shape == (2, 5)
    # Keras is as it was: a symbolic call still makes nodes.
    again = keras.Model(model.input, model(model.input))
    assert len(again.layers) == 2


def residual():
    inputs = keras.Input((None, 24))
    x = layers.Dense(32, name="open")(inputs)
    for k in range(2):
        h = layers.LayerNormalization(name=f"norm_{k}")(x)
        h = layers.Dense(48, activation="gelu", name=f"up_{k}")(h)
        x = x + layers.Dense(32, name=f"down_{k}")(h)
    return keras.Model(inputs, x)


def test_the_residual_stream_is_whole():
    plan = plan_of(residual)
    expected = {}
    for k in range(2):
        expected |= {f"up_{k}/kernel": 1, f"up_{k}/bias": 0}
        expected |= {f"down_{k}/kernel": 0}
    assert split(plan) == expected
    # For each pair, its output and the gradient of its input.
    assert plan.collectives(2, 6) == {"all_reduce": (4, 4 * 2 * 6 * 32 * 4)}
    with pytest.raises(ValueError, match="pass `sequence_length`"):
        plan.collectives(2)


def attention():
    inputs = keras.Input((6, 24))
    x = layers.MultiHeadAttention(4, 8, name="attention")(inputs, inputs)
    return keras.Model(inputs, x)


HEADS = {
    **{f"attention/{name}/kernel": 1 for name in ("query", "key", "value")},
    **{f"attention/{name}/bias": 0 for name in ("query", "key", "value")},
    "attention/attention_output/kernel": 0,
}


def test_attention_is_split_by_heads():
    assert split(plan_of(attention)) == HEADS


def test_heads_are_never_cut():
    plan = plan_of(attention, 8)
    assert split(plan) == {}
    assert "heads: 4 does not divide by 8" in plan["attention/query/kernel"].why


def grouped(key_value_heads, queries=8):
    def build():
        inputs = keras.Input((6, 24))
        x = layers.GroupQueryAttention(
            8, queries, key_value_heads, name="attention"
        )(inputs, inputs)
        return keras.Model(inputs, x)

    return build


@pytest.mark.parametrize("heads", [1, 2])
def test_too_few_heads_of_keys_and_values_are_whole(heads):
    assert split(plan_of(grouped(heads))) == {
        "attention/query/kernel": 1,
        "attention/query/bias": 0,
        "attention/attention_output/kernel": 0,
    }


def test_enough_heads_of_keys_and_values_are_split():
    plan = plan_of(grouped(4))
    assert split(plan) == HEADS


class Composite(layers.Layer):
    """Queries are (head of keys, group); keys are not repeated."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.q = layers.EinsumDense("btd,dnh->btnh", (None, 4, 8), name="a")
        self.k = layers.EinsumDense("btd,dkh->btkh", (None, 2, 8), name="b")
        self.v = layers.EinsumDense("btd,dkh->btkh", (None, 2, 8), name="c")
        self.o = layers.EinsumDense("btnh,nhd->btd", (None, 24), name="d")

    def build(self, shape):
        for layer in (self.q, self.k, self.v):
            layer.build(shape)
        self.o.build((*shape[:-1], 4, 8))

    def call(self, x):
        ops = keras.ops
        length = x.shape[1]
        q = ops.reshape(self.q(x), (-1, length, 2, 2, 8))
        scores = ops.einsum("btkgh,bskh->bkgts", q, self.k(x))
        out = ops.einsum("bkgts,bskh->btkgh", ops.softmax(scores), self.v(x))
        return self.o(ops.reshape(out, (-1, length, 4, 8)))


def composite():
    inputs = keras.Input((6, 24))
    return keras.Model(inputs, Composite(name="x")(inputs))


def test_heads_made_of_two_dims_are_split_along_both():
    assert split(plan_of(composite, 2)) == {
        "x/a/kernel": 1,
        "x/b/kernel": 1,
        "x/c/kernel": 1,
        "x/d/kernel": 0,
    }
    # 2 heads of keys by 2 groups of queries; the keys are on all devices.
    plan = plan_of(composite, 4)
    assert split(plan) == {"x/a/kernel": 1, "x/d/kernel": 0}
    assert "which the plan does not predict" in plan["x/a/kernel"].why
    assert "predict" not in plan_of(composite, 2)["x/a/kernel"].why


class Flat(layers.Layer):
    """Projections to one dim, reshaped to heads; keys are repeated."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.q = layers.Dense(64, name="a")
        self.k = layers.Dense(32, name="b")
        self.v = layers.Dense(32, name="c")
        self.o = layers.Dense(24, name="d")

    def build(self, shape):
        for layer in (self.q, self.k, self.v):
            layer.build(shape)
        self.o.build((*shape[:-1], 64))

    def call(self, x):
        ops = keras.ops

        def heads(x, count):
            x = ops.reshape(x, (-1, 6, count, 16))
            return ops.transpose(
                ops.repeat(x, 4 // count, axis=2), (0, 2, 1, 3)
            )

        q, k, v = heads(self.q(x), 4), heads(self.k(x), 2), heads(self.v(x), 2)
        scores = ops.softmax(ops.matmul(q, ops.transpose(k, (0, 1, 3, 2))))
        out = ops.transpose(ops.matmul(scores, v), (0, 2, 1, 3))
        return self.o(ops.reshape(out, (-1, 6, 64)))


def test_heads_of_a_flat_projection_are_never_cut_inside():
    """As KerasHub's SmolLM3; half heads would be gathered in each step."""

    def build():
        inputs = keras.Input((6, 24))
        return keras.Model(inputs, Flat(name="x")(inputs))

    plan = plan_of(build, 2)
    assert split(plan)["x/b/kernel"] == 1
    plan = plan_of(build, 4)
    assert split(plan) == {
        "x/a/kernel": 1,
        "x/a/bias": 0,
        "x/d/kernel": 0,
    }
    assert "heads" in plan["x/b/kernel"].why


class Scale(layers.Layer):
    """The last part of a normalization in each head, as in Gemma 3."""

    def build(self, shape):
        self.scale = self.add_weight(shape=shape[-1:], name="scale")

    def call(self, x):
        return x * (1 + self.scale)


def test_the_gradient_of_a_scale_within_split_heads_is_summed():
    inputs = keras.Input((6, 24))
    x = layers.EinsumDense("btf,fhd->bthd", (6, 4, 7), name="a")(inputs)
    x = Scale(name="s")(x)
    outputs = layers.EinsumDense("bthd,hdf->btf", (6, 24), name="b")(x)
    plan = plan_of(keras.Model(inputs, outputs))
    assert split(plan) == {"a/kernel": 1, "b/kernel": 0}
    found = [(r.path, r.backward, r.size.at(3, 1)) for r in plan.reductions]
    assert found == [("s", True, 4 * 7), ("b", False, 4 * 6 * 24 * 3)]


class Fused(layers.Layer):
    """Queries, keys and values in one kernel."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.a = layers.Dense(96, name="a")
        self.b = layers.Dense(32, name="b")

    def build(self, shape):
        self.a.build(shape)
        self.b.build(shape)

    def call(self, x):
        ops = keras.ops
        parts = ops.split(self.a(x), 3, axis=-1)
        q, k, v = (
            ops.transpose(ops.reshape(p, (-1, 6, 4, 8)), (0, 2, 1, 3))
            for p in parts
        )
        scores = ops.softmax(ops.matmul(q, ops.transpose(k, (0, 1, 3, 2))))
        out = ops.transpose(ops.matmul(scores, v), (0, 2, 1, 3))
        return self.b(ops.reshape(out, (-1, 6, 32)))


def test_fused_projections_are_planned_in_blocks():
    """And the layers that they are combined with are split with them."""
    inputs = keras.Input((6, 32))
    outputs = layers.LayerNormalization()(Fused(name="x")(inputs))
    plan = plan_of(keras.Model(inputs, outputs))
    assert split(plan) == {"x/a/kernel": 1, "x/a/bias": 0, "x/b/kernel": 0}
    # The inputs of the model need no gradient.
    assert plan.collectives(4)["all_reduce"][0] == 1
    row = plan["x/a/kernel"]
    assert (row.axes, row.blocks) == ((None, "model"), 3)
    assert "each of its 3 blocks is split" in row.why
    assert "in 3 blocks" in plan.summary()


def test_layouts_of_planned_blocks():
    inputs = keras.Input((6, 32))
    outputs = layers.LayerNormalization()(Fused(name="x")(inputs))
    plan = plan_of(keras.Model(inputs, outputs))
    layout = plan.layout_map["x/a/kernel"]
    if plan.instead:
        # This backend has no parts of blocks.
        assert layout.axes == (None, None)
        return
    assert layout.axes == (None, "model") and layout.blocks == {1: 3}
    assert plan.layout_map["x/a/bias"].blocks == {0: 3}
    assert plan.layout_map["x/b/kernel"].blocks == {}


class Sliced(Fused):
    """A fused projection whose blocks are taken by slices."""

    def call(self, x):
        y = self.a(x)
        return self.b(y[..., :32] * y[..., 32:64] + y[..., 64:])


def test_blocks_that_are_cut_by_slices_stay_whole():
    inputs = keras.Input((6, 32))
    outputs = layers.LayerNormalization()(Sliced(name="x")(inputs))
    plan = plan_of(keras.Model(inputs, outputs))
    assert not any(row.is_split for row in plan.variables)
    why = plan["x/a/kernel"].why
    assert "3 blocks in one dim, and GetItem in 'x' reads them" in why
    assert "goes with 'x/a/kernel'" in plan["x/b/kernel"].why


def test_a_backend_without_blocks_keeps_the_plan():
    inputs = keras.Input((6, 32))
    outputs = layers.LayerNormalization()(Fused(name="x")(inputs))
    graph = trace.trace(keras.Model(inputs, outputs), None)
    own, nothing = planner.plan_graph(graph, mesh(1, 4))
    other, instead = planner.plan_graph(graph, mesh(1, 4), in_blocks=False)
    assert nothing == {} and str(own) == str(other)
    assert set(instead) == {"x/a/kernel", "x/a/bias", "x/b/kernel"}
    assert not any(row.is_split for row in instead.values())
    assert "this backend has no dims of blocks" in instead["x/a/kernel"].why


def test_learned_queries_are_activations():
    """Made for each example of weights alone, they are no product of weights.

    The queries themselves are whole: their sums would be as large as those of
    any activation.
    """
    plan = plan_of(small_models.learned_queries)
    found = split(plan)
    columns = {path for path, dim in found.items() if dim == 1}
    assert columns == {f"queries/{name}/kernel" for name in ("up", *"qkv")}
    assert found["queries/down/kernel"] == found["queries/o/kernel"] == 0
    assert "same for all examples" in plan["queries/queries"].why
    # Two outputs, and the gradient of what the queries are made of.
    assert [(r.path, r.backward) for r in plan.reductions] == [
        ("queries/up", True),
        ("queries/down", False),
        ("queries/q", True),
        ("queries/o", False),
    ]


def test_gated_pair():
    inputs = keras.Input((24,))
    gate = layers.Dense(16, activation="silu", name="gate")(inputs)
    x = gate * layers.Dense(16, name="up")(inputs)
    model = keras.Model(inputs, layers.Dense(5, name="down")(x))
    assert split(plan_of(model)) == {
        **PAIR,
        "gate/kernel": 1,
        "gate/bias": 0,
    }


def test_tied_embedding_is_split_over_the_vocabulary():
    inputs = keras.Input((None,), dtype="int32")
    table = layers.ReversibleEmbedding(48, 20, name="tokens")
    x = layers.LayerNormalization()(table(inputs))
    plan = plan_of(keras.Model(inputs, table(x, reverse=True)))
    assert split(plan) == {"tokens/embeddings": 0}
    # What is looked up, and the gradient of what the logits are made of.
    size = 2 * 6 * 20 * 4
    assert plan.collectives(2, 6) == {"all_reduce": (2, 2 * size)}


def test_convolutions_alternate():
    inputs = keras.Input((12, 12, 3))
    x = layers.Conv2D(16, 3, name="up", activation="relu")(inputs)
    x = layers.BatchNormalization(name="norm")(x)
    x = layers.DepthwiseConv2D(3, name="depth")(x)
    model = keras.Model(inputs, layers.Conv2D(10, 1, name="down")(x))
    assert split(plan_of(model)) == {
        "up/kernel": 3,
        "up/bias": 0,
        **{
            f"norm/{name}": 0
            for name in ("gamma", "beta", "moving_mean", "moving_variance")
        },
        "depth/kernel": 2,
        "depth/bias": 0,
        "down/kernel": 2,
    }


def recurrent(layer, **kwargs):
    """Returns the rows of a recurrent layer before a `Dense` layer."""
    inputs = keras.Input((6, 12))
    x = layer(16, name="recurrent", **kwargs)(inputs)
    plan = plan_of(keras.Model(inputs, layers.Dense(5)(x)))
    return [row for row in plan.variables if row.path.startswith("recurrent")]


@pytest.mark.parametrize(
    "layer, gates", [(layers.LSTM, 4), (layers.GRU, 3), (layers.SimpleRNN, 1)]
)
def test_units_of_each_gate_are_split(layer, gates):
    for row in recurrent(layer):
        assert row.axes == (None, "model")[-len(row.shape) :]
        assert row.blocks == gates
        # A loop of unknown length communicates at each of its steps.
        assert row.is_predicted == (row.path.endswith("bias"))


@pytest.mark.parametrize(
    "layer, kwargs",
    [
        (layers.LSTM, {"use_cudnn": True}),
        (layers.GRU, {"reset_after": False}),
    ],
)
def test_gates_that_cannot_be_split_alike_stay_together(layer, kwargs):
    for row in recurrent(layer, **kwargs):
        assert not row.is_split
        if len(row.shape) > 1:
            assert "gates of a unit" in row.why


def test_a_small_head_does_not_break_up_a_pair():
    inputs = keras.Input((24,))
    x = layers.Dense(64, name="a")(inputs)
    x = layers.Dense(32, name="b")(x)
    model = keras.Model(inputs, layers.Dense(4, name="c")(x))
    found = split(plan_of(model))
    assert found["a/kernel"] == 1 and found["b/kernel"] == 0


@pytest.mark.parametrize("depth", [1, 30])
def test_the_head_of_a_deep_model_is_split_as_that_of_a_flat_one(depth):
    """No layer of it is a large share of the parameters, nor is its head."""
    inputs = x = keras.Input((16,))
    for i in range(depth):
        x = layers.LayerNormalization()(x)
        x = layers.Dense(64, activation="relu", name=f"up_{i}")(x)
        x = layers.Dense(16, name=f"down_{i}")(x)
    x = layers.LayerNormalization()(x)
    outputs = layers.Dense(32, name="head")(x), layers.Dense(4, name="tag")(x)
    plan = plan_of(keras.Model(inputs, outputs))
    assert plan["head/kernel"].axes == (None, "model")
    share = plan["head/kernel"].nbytes / sum(v.nbytes for v in plan.variables)
    assert (share < 0.01) == (depth == 30)
    assert len(plan.reductions) == 2 * depth + 1
    # One that saves next to nothing.
    assert plan["tag/kernel"].is_split == (depth == 1)


class Doubling(layers.Layer):
    """Its call does what no symbolic tensor can do."""

    def build(self, shape):
        self.scale = self.add_weight(shape=shape[-1:], name="scale")

    def call(self, x):
        return x * keras.ops.convert_to_tensor(2 * x.numpy())

    def compute_output_spec(self, x):
        return keras.KerasTensor(x.shape, x.dtype)


def with_layer(layer):
    def build():
        inputs = keras.Input((12,))
        x = layers.Dense(16, name="up")(inputs)
        return keras.Model(inputs, layers.Dense(8, name="down")(layer(x)))

    return build


def test_a_layer_without_a_rule_is_reported_and_whole():
    plan = plan_of(with_layer(Doubling(name="doubling")))
    assert plan.without_rule == {"Doubling": "doubling"}
    assert not plan["doubling/scale"].is_split
    assert "Doubling has no rule" in plan["up/kernel"].why
    assert "No rule for Doubling" in plan.summary()
    assert "variables of" in plan.summary()


class Known(Doubling):
    pass


def test_a_registered_rule():
    @distribution.register_rule(Known)
    def known(dims, step):
        dims.elementwise(step.inputs, step.outputs[0])
        dims.same(step.variables[0], 0, step.outputs[0], -1)

    plan = plan_of(with_layer(Known(name="known")))
    assert split(plan) == {**PAIR, "known/scale": 0}
    assert plan.without_rule == {}
    with pytest.raises(ValueError, match="takes a subclass of"):
        distribution.register_rule("Known")


def test_overrides_take_their_pair_along():
    plan = plan_of(residual, overrides={"up_0/kernel": (None, None)})
    assert plan["up_0/kernel"].why == "override" + reasons.DISAGREES
    assert not plan["up_0/kernel"].is_split
    assert "up_1/kernel" in split(plan)
    # The cheapest first would be another: what is forced decides.
    plan = plan_of(mlp, overrides={".*down/kernel": ("model", None)})
    assert split(plan) == PAIR


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"nothing": (None,)}, "matches no variable"),
        ({"up/kernel": ("model",)}, "rank"),
        ({"up/kernel": ("rows", None)}, "Invalid axis names"),
        ({"down/kernel": (None, "model")}, "does not divide"),
        (
            {"up/.*": (None, None), "up/kernel": (None, "model")},
            "rank|Two overrides",
        ),
    ],
)
def test_overrides_that_cannot_hold(overrides, message):
    with pytest.raises(ValueError, match=message):
        plan_of(mlp, overrides=overrides)


def test_axes():
    assert planner.model_axis(mesh(2, 2)) == "model"
    names = ("data", "rows")
    assert planner.model_axis(mesh(2, 2, axis_names=names)) == "rows"
    assert planner.model_axis(mesh(2, axis_names=("data",))) is None
    three = mesh(2, 2, 2, axis_names=("data", "model", "other"))
    assert planner.model_axis(three) == "model"
    plan = distribution.plan_sharding(mlp, three)
    assert split(plan) == PAIR


def test_gradients_are_summed_over_the_replicas():
    plan = distribution.plan_sharding(mlp, mesh(2, 4))
    # Each replica has half of the batch, and each device its shards.
    forward = 4 * 5 * 4
    gradients = (12 * 16 // 4 + 16 // 4 + 16 * 5 // 4 + 5) * 4
    assert plan.collectives(8) == {"all_reduce": (5, forward + gradients)}


def test_what_is_not_a_model():
    with pytest.raises(ValueError, match="takes a Keras model or a function"):
        distribution.plan_sharding(3, mesh(1, 2))


def test_inputs_that_are_not_known():
    class Subclassed(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = layers.Dense(16)
            self.other = layers.Dense(8)

        def call(self, x):
            return self.other(self.dense(x))

    with pytest.raises(ValueError, match="Pass `input_spec`"):
        plan_of(Subclassed)
    plan = plan_of(Subclassed, input_spec=(None, 12))
    assert sorted(split(plan).values()) == [0, 0, 1]


def test_sizes_that_only_the_input_spec_says():
    inputs = keras.Input((None, 8))
    model = keras.Model(inputs, layers.Dense(16)(inputs))
    model.input_spec = keras.InputSpec(shape=(None, 4, 8))
    assert sorted(split(plan_of(lambda: model)).values()) == [0, 1]


def test_lora_follows_its_kernel():
    model = mlp()
    for name in ("up", "down"):
        model.get_layer(name).enable_lora(4)
    assert split(plan_of(model)) == {
        **PAIR,
        "up/lora_kernel_b": 1,
        "down/lora_kernel_a": 0,
    }


def test_lora_sums_the_gradients_of_its_whole_factors():
    model = mlp()
    bare = plan_of(model).collectives(2)["all_reduce"]
    for name in ("up", "down"):
        model.get_layer(name).enable_lora(4)
    count, size = plan_of(model).collectives(2)["all_reduce"]
    factors = [
        model.get_layer("up").lora_kernel_a,
        model.get_layer("down").lora_kernel_b,
    ]
    assert count == bare[0] + 2
    assert size == bare[1] + sum(4 * np.prod(f.shape) for f in factors)


def test_int8_is_split_as_floats_are():
    model = mlp()
    model.quantize("int8")
    plan = plan_of(model)
    assert split(plan) == {**PAIR, "up/kernel_scale": 0}


@pytest.mark.parametrize("block_size", [-1, 4])
def test_int4_is_split_in_whole_bytes(block_size):
    model = mlp()
    config = keras.quantizers.Int4QuantizationConfig(block_size=block_size)
    model.quantize("int4", config=config)
    found = split(plan_of(model))
    expected = {**PAIR, "up/kernel_scale": 0}
    if block_size == 4:
        # The groups of rows are on every device, and looked up there.
        expected |= {"up/kernel_scale": 1, "up/kernel_zero": 1}
        expected |= {"down/g_idx": 0}
    assert found == expected
    assert split(plan_of(model, count=16)).get("up/kernel") is None


def test_a_scale_goes_with_its_kernel_only():
    """Larger than the kernel, it would be split along its other dim."""
    inputs = keras.Input((6,), dtype="int32")
    x = layers.Embedding(24, 32, name="tokens")(inputs)
    model = keras.Model(inputs, layers.Dense(12, name="down")(x))
    config = keras.quantizers.Int4QuantizationConfig(block_size=2)
    model.quantize("int4", config=config)
    kernel, scale = (
        plan_of(model)[f"tokens/{name}"].axes
        for name in ("embeddings", "embeddings_scale")
    )
    assert any(kernel)
    assert scale[0] == kernel[0]
    assert scale[1] is None


def test_a_kernel_that_meets_two_split_dims():
    """Its outputs and its inputs are split for other kernels."""
    x = keras.Input((512,))
    a = layers.Dense(256, name="a")(x)
    b = layers.Dense(256, name="b")(x)
    c = layers.Dense(256, use_bias=False, name="between")(a)
    y = layers.Dense(512, name="c")(a) + layers.Dense(512, name="d")(b + c)
    plan = plan_of(keras.Model(x, y), overrides={"d/kernel": ("model", None)})
    said = [row.path for row in plan.variables if "not predict" in row.why]
    assert said == ["between/kernel"]
    paths = [row.path for row in plan.reductions]
    assert {"c", "d"} <= set(paths)
    text = " ".join(plan.summary().split())
    assert "which the plan does not predict, the first is" in text


def test_what_no_output_depends_on_has_no_gradient():
    """A backbone's pooled output, in a model of its other output."""
    x = keras.Input((8, 16))
    h = layers.Dense(16, name="embedding")(x)
    pooled = layers.Dense(64, name="pooled_up")(h[:, 0])
    pooled = layers.Dense(16, name="pooled_down")(pooled)
    y = layers.Dense(16, name="down")(layers.Dense(64, name="up")(h))
    backward = [
        [row.path for row in plan_of(model).reductions if row.backward]
        for model in (keras.Model(x, [y, pooled]), keras.Model(x, y))
    ]
    assert sorted(backward[0]) == ["pooled_up", "up"]
    assert backward[1] == ["up"]
    z = keras.Input((8, 16))
    used = keras.Model(z, keras.Model(x, [y, pooled])(z)[0])
    paths = [row.path for row in plan_of(used).reductions if row.backward]
    assert [path.rpartition("/")[2] for path in paths] == ["up"]


def test_collectives_of_a_text_behind_other_tokens():
    """The size of a concatenated dim grows with the length, not by it."""
    tokens, image = keras.Input((None, 16)), keras.Input((8, 16))
    h = layers.Concatenate(axis=1)([image, tokens])
    h = layers.Dense(64, name="up")(h)
    model = keras.Model([tokens, image], layers.Dense(16, name="down")(h))
    plan = plan_of(model)
    assert plan.collectives(2, 16) == {"all_reduce": (1, 2 * 24 * 16 * 4)}
    again = distribution.ShardingPlan.from_json(plan.to_json())
    assert again.collectives(2, 16) == plan.collectives(2, 16)


def test_collectives_of_a_batch_with_an_example_more():
    """As Gemma 3n adds an image of its own to each batch."""

    class Adding(layers.Layer):
        def call(self, x):
            return keras.ops.concatenate([x, keras.ops.zeros((1, 16))], axis=0)

    x = keras.Input((16,))
    h = layers.Dense(64, name="up")(Adding()(x))
    h = layers.Dense(16, name="down")(h)
    plan = plan_of(keras.Model(x, h[:-1, :]))
    assert plan.collectives(2) == {"all_reduce": (1, 3 * 16 * 4)}
    again = distribution.ShardingPlan.from_json(plan.to_json())
    assert again.collectives(2) == plan.collectives(2)


class Experts(layers.Layer):
    """A router chooses one expert for each token."""

    def build(self, shape):
        self.up = self.add_weight((4, shape[-1], 24), name="up")
        self.down = self.add_weight((4, 24, shape[-1]), name="down")
        self.router = layers.Dense(4, name="router")

    def call(self, x):
        hidden = ops.relu(ops.einsum("btd,edf->ebtf", x, self.up))
        found = ops.einsum("ebtf,efd->ebtd", hidden, self.down)
        taken = ops.one_hot(ops.argmax(self.router(x), axis=-1), 4)
        return ops.einsum("ebtd,bte->btd", found, taken)


def test_experts_are_split_over_the_devices_or_each_of_them_by_bytes():
    def model():
        inputs = keras.Input((7, 16))
        x = layers.LayerNormalization()(inputs)
        x = inputs + Experts(name="experts")(x)
        return keras.Model(inputs, layers.LayerNormalization()(x))

    row = plan_of(model, 4)["experts/up"]
    assert row.axes == ("model", None, None)
    # A sum over the experts of what they return, for each token and feature,
    # against a sum inside of each expert.
    assert row.why.endswith(
        "along dim 2 it would communicate 2.19 KiB per example, not 896 B"
    )
    row = plan_of(model, 8)["experts/up"]
    assert row.axes == (None, None, "model")
    assert "would communicate" not in row.why
