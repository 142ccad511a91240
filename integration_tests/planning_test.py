"""Plans of whole models: what is split, and that it is the same everywhere.

To write the golden files anew: KERAS_TP_UPDATE_GOLDEN=1. Look at their diff.
"""

import os
import pathlib
import re

import keras
import numpy as np
import pytest

from integration_tests import harness
from integration_tests import hub_models
from integration_tests import small_models
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
    """Returns the file of a plan, with its estimate of activations."""
    # Keras's default for integers is another one on TensorFlow.
    return plan.to_json().replace('"int64"', '"int32"')


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


DIM_OF_THE_STREAM = "dim 0 is split, which communicates: normalized over"
QUERY_KEY_VALUE = {
    f"transformer_layer_{k}/self_attention/{name}/kernel": DIM_OF_THE_STREAM
    for k in range(hub_models.LAYERS)
    for name in ("query", "key", "value")
}
NOT_DIVISIBLE = {
    f"decoder_block_{k}/attention/{name}/kernel": "does not divide by 4"
    for k in range(hub_models.LAYERS)
    for name in ("key", "value")
}
HEAD = {"token_embedding/reverse_embeddings": "would save 18.00 KiB"}


@pytest.mark.parametrize(
    ("name", "backbone", "defects"),
    [
        ("llama", "LlamaBackbone", {**QUERY_KEY_VALUE, **HEAD}),
        ("llama3", "Llama3Backbone", {**QUERY_KEY_VALUE, **HEAD}),
        (
            "qwen",
            "QwenBackbone",
            {
                **QUERY_KEY_VALUE,
                "transformer_layer_0/self_attention/query/bias": "replicated",
                "transformer_layer_1/self_attention/query/bias": "replicated",
            },
        ),
        ("gemma", "GemmaBackbone", NOT_DIVISIBLE),
    ],
)
def test_defects_of_the_maps_of_keras_hub(name, backbone, defects):
    """Llama's and Qwen's split the hidden dim where the heads were meant."""
    plan = plan_of(hub_models.MODELS[name])
    layout_map = getattr(hub_models.models(), backbone).get_layout_map(
        plan.device_mesh
    )
    found = dict(plan.compare(layout_map))
    assert found.keys() == defects.keys()
    for path, message in defects.items():
        assert message in found[path], path


def test_names_that_say_nothing():
    plan = plan_of(small_models.Nameless, input_spec=(None, 6, 32))
    dims = [row.axes for row in plan.variables if len(row.shape) == 2]
    column, row = (None, "model"), ("model", None)
    assert sorted(map(str, dims)) == sorted(map(str, 4 * [column] + 2 * [row]))


@pytest.mark.parametrize(
    "build",
    [
        small_models.shared,
        small_models.nested,
        small_models.several,
        small_models.with_lambda,
    ],
)
def test_shapes_of_models(build):
    plan = plan_of(build)
    dims = [
        row.axes.index("model")
        for row in plan.variables
        if len(row.shape) == 2 and row.is_split
    ]
    assert {0, 1} <= set(dims)
    assert not plan.without_rule
    assert plan.split_share > 0.4
    # The same as of the model that has weights.
    keras.utils.clear_session()
    assert plan_of(build()).to_json() == plan.to_json()
