"""Plans of whole models: what is split, and that it is the same everywhere.

To write the golden files anew: KERAS_TP_UPDATE_GOLDEN=1. Look at their diff.
"""

import os
import pathlib
import re

import keras
import numpy as np
import pytest
from keras import layers

from integration_tests import harness
from integration_tests import hub_models
from integration_tests import zoo
from keras_tp import distribution

GOLDEN = pathlib.Path(__file__).parent / "golden"
COUNTS = [2, 4]

# What is not split although it is a matrix, and why that is right.
POSITIONS = "a table of positions: looked up, it would be summed for nothing"
STREAM = "from the residual stream to the residual stream: no pair to be in"
KEY_VALUE = "2 heads of keys and values on 4 devices"
WHOLE = {
    r".*position.*embeddings?": POSITIONS,
    r".*segment_embedding/embeddings": "2 or 3 rows",
    r".*mlm_head/intermediate_dense/kernel": STREAM,
    r"embedding_projection/kernel": STREAM,
    r"(vision|text)_projection/kernel": STREAM,
    r"predictions/kernel": "the last layer is next to nothing",
    r".*/(key|value)/(kernel|bias)": KEY_VALUE,
    r".*sparse_feedforward_gate_dense/kernel": "the router sees all experts",
    r".*patch_embedding/kernel": "the convolution that opens the stream",
    r".*(class_token|position_ids)": "1 row",
    r"stem_conv/kernel": "its outputs are added to those of others",
    r"stack0_block\d_3_conv/kernel": "the 4 times wider sum would be split",
}


def abstract_mesh(shape, axis_names=("batch", "model")):
    """Returns a mesh of devices that need not exist."""
    devices = [f"cpu:{i}" for i in range(int(np.prod(shape)))]
    return keras.distribution.DeviceMesh(shape, list(axis_names), devices)


def plan_of(build, count=4, **kwargs):
    return distribution.plan_sharding(
        build, abstract_mesh((1, count)), **kwargs
    )


def split_of(plan):
    """Returns a dict of the split paths to the dim that is split."""
    return {
        row.path: row.axes.index("model")
        for row in plan.variables
        if row.is_split
    }


@pytest.mark.parametrize("name", sorted(hub_models.MODELS))
def test_keras_hub(name):
    for count in COUNTS:
        plan = plan_of(hub_models.MODELS[name], count)
        text = golden_text(plan)
        path = GOLDEN / f"{name}_{count}.json"
        if os.environ.get("KERAS_TP_UPDATE_GOLDEN"):
            path.write_text(text)
        assert text == path.read_text(), f"{path} differs"
        check_whole(plan, count)
        assert plan.split_share >= 0.9
        assert not plan.without_rule


def golden_text(plan):
    """Returns the file of a plan without its estimate of activations.

    Attention is one operation on some backends and several on others, which
    keep what is between them.
    """
    # Keras's default for integers is another one on TensorFlow.
    text = plan.to_json().replace('"int64"', '"int32"')
    lines = text.splitlines(keepends=True)
    return "".join(line for line in lines if '"activations"' not in line)


def check_whole(plan, count):
    """Whatever is whole is expected to be."""
    for row in plan.variables:
        if len(row.shape) < 2 or row.is_split:
            continue
        known = [why for p, why in WHOLE.items() if re.fullmatch(p, row.path)]
        assert known, (row.path, row.shape, row.why)
        if known[0] == KEY_VALUE:
            assert count == 4 and {1, 2} & set(row.shape) or 1 in row.shape


BY_HAND = [
    "mlp",
    "multi_head_attention",
    "grouped_query_attention",
    "multi_query_attention",
    "einsum_dense",
    "batch_normalization",
    "dropout",
    "opt",
    "bert",
    "llama",
]


@pytest.mark.parametrize("name", BY_HAND)
def test_the_plan_is_the_map_that_is_written_by_hand(name):
    """What these maps communicate is counted in collectives_test.py."""
    case = zoo.CASES[name]
    plan = plan_of(harness.build(case))
    outside = set(split_of(plan)) ^ case.split
    # What follows the model's last pair is next to nothing.
    assert outside <= {"head/kernel", "head/bias"}
    for path, dim in split_of(plan).items():
        for pattern, axes in case.layouts.items():
            if re.fullmatch(pattern, path):
                assert axes[dim] == "model", path


def blocks(mixer):
    """Two blocks of a transformer between layers that are whole."""

    def build():
        inputs = keras.Input((6, 12))
        x = layers.Dense(32, name="open")(inputs)
        for k in range(2):
            h = layers.LayerNormalization(name=f"norm_{k}_a")(x)
            x = x + mixer(k, h)
            h = layers.LayerNormalization(name=f"norm_{k}_b")(x)
            h = layers.Dense(48, activation="gelu", name=f"up_{k}")(h)
            x = x + layers.Dense(32, name=f"down_{k}")(h)
        x = layers.LayerNormalization(name="norm")(x)
        return keras.Model(inputs, x, name="blocks")

    return build


def attention(k, x):
    return layers.MultiHeadAttention(4, 8, name=f"attention_{k}")(x, x)


def gated(k, x):
    gate = layers.Dense(24, activation="silu", name=f"gate_{k}")(x)
    x = gate * layers.Dense(24, name=f"wide_{k}")(x)
    return layers.Dense(32, name=f"narrow_{k}")(x)


@pytest.mark.parametrize(
    ("build", "count"), [(blocks(attention), 8), (blocks(gated), 8)]
)
def test_what_is_predicted_is_counted(build, count):
    with plan_on_devices(build).distribution().scope():
        plan = keras.distribution.distribution().plan
        model = build()
        model.compile("sgd", "mse")
    x = np.ones((4, 6, 12), "float32")
    counted = distribution.count_collectives(
        model, x, np.ones((4, 6, 32), "float32")
    )
    predicted, size = plan.collectives(4)["all_reduce"]
    assert predicted == count
    terms = sum(row.terms - 1 for row in plan.reductions)
    if keras.backend.backend() == "jax":
        # XLA for CPUs sums the gradients of an input one by one.
        predicted += terms
        size += sum(
            (row.terms - 1) * row.size.at(4, 1) for row in plan.reductions
        )
    assert counted["all_reduce"] == (predicted, size)
    assert not any(pair[0] for k, pair in counted.items() if k != "all_reduce")


def plan_on_devices(build):
    return distribution.plan_sharding(build, harness.mesh((1, 4)))


class Nameless(keras.Model):
    """Attention and a pair whose names say nothing."""

    def __init__(self):
        super().__init__()
        self.x1 = [layers.Dense(32) for _ in range(4)]
        self.x2 = layers.LayerNormalization()
        self.x3 = layers.Dense(48, activation="relu")
        self.x4 = layers.Dense(32)

    def call(self, x):
        ops = keras.ops
        x = self.x2(x)
        q, k, v = (
            ops.reshape(layer(x), (-1, 6, 4, 8)) for layer in self.x1[:3]
        )
        scores = ops.einsum("bthd,bshd->bhts", q, k)
        mixed = ops.einsum("bhts,bshd->bthd", ops.softmax(scores), v)
        x = x + self.x1[3](ops.reshape(mixed, (-1, 6, 32)))
        return self.x4(self.x3(self.x2(x)))


def test_names_that_say_nothing():
    plan = plan_of(Nameless, input_spec=(None, 6, 32))
    dims = [row.axes for row in plan.variables if len(row.shape) == 2]
    column, row = (None, "model"), ("model", None)
    assert sorted(map(str, dims)) == sorted(map(str, 4 * [column] + 2 * [row]))
    x = np.random.default_rng(0).standard_normal((2, 6, 32), "float32")
    model = harness_seeded(Nameless)
    expected = keras.ops.convert_to_numpy(model(x))
    mesh = harness.mesh((1, 4))
    distribution.distribute_model(model, distribution.TensorParallel(mesh))
    found = keras.ops.convert_to_numpy(model(x))
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def harness_seeded(build):
    keras.utils.set_random_seed(1)
    return build()


def shared():
    inputs = keras.Input((16,))
    norm = layers.LayerNormalization(name="norm")
    up = layers.Dense(24, activation="relu", name="up")
    down = layers.Dense(16, name="down")
    x = inputs
    for _ in range(2):
        x = norm(x + down(up(x)))
    return keras.Model(inputs, x)


def nested():
    inputs = keras.Input((16,))
    inner = keras.Sequential(
        [layers.Dense(24, activation="relu"), layers.Dense(16)], name="inner"
    )
    x = layers.LayerNormalization()(inner(inputs))
    return keras.Model(inputs, inner(x))


def several():
    a, b = keras.Input((16,), name="a"), keras.Input((12,), name="b")
    x = layers.Concatenate()(
        [layers.Dense(24, name="up_a")(a), layers.Dense(24, name="up_b")(b)]
    )
    x = layers.Dense(16, name="down")(x)
    x = layers.LayerNormalization(name="norm")(x)
    y = layers.Dense(24, activation="relu", name="up")(x)
    return keras.Model(
        {"a": a, "b": b}, {"x": x, "y": layers.Dense(8, name="end")(y)}
    )


def with_lambda():
    inputs = keras.Input((16,))
    x = layers.Dense(24, name="up")(inputs)
    x = layers.Lambda(lambda t: keras.ops.square(t) + 1.0)(x)
    return keras.Model(inputs, layers.Dense(12, name="down")(x))


@pytest.mark.parametrize(
    ("build", "columns", "rows"),
    [(shared, 1, 1), (nested, 1, 1), (several, 1, 1), (with_lambda, 1, 1)],
)
def test_shapes_of_models(build, columns, rows):
    plan = plan_of(build)
    dims = [
        row.axes.index("model")
        for row in plan.variables
        if len(row.shape) == 2 and row.is_split
    ]
    assert dims.count(1) >= columns and dims.count(0) >= rows
    assert not plan.without_rule
    assert plan.split_share > 0.4
    # The same as of the model that has weights.
    keras.utils.clear_session()
    assert plan_of(build()).to_json() == plan.to_json()
