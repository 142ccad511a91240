"""Plans of whole models: what is split, and that it is the same everywhere.

To write the golden files anew: KERAS_TP_UPDATE_GOLDEN=1. Look at their diff.
"""

import os
import pathlib
import re

import keras
import numpy as np
import pytest

from integration_tests import hub_models
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
        text = plan.to_json()
        path = GOLDEN / f"{name}_{count}.json"
        if os.environ.get("KERAS_TP_UPDATE_GOLDEN"):
            path.write_text(text)
        assert text == path.read_text(), f"{path} differs"
        check_whole(plan, count)
        assert plan.split_share >= 0.9
        assert not plan.without_rule


def check_whole(plan, count):
    """Whatever is whole is expected to be."""
    for row in plan.variables:
        if len(row.shape) < 2 or row.is_split:
            continue
        known = [why for p, why in WHOLE.items() if re.fullmatch(p, row.path)]
        assert known, (row.path, row.shape, row.why)
        if known[0] == KEY_VALUE:
            assert count == 4 and {1, 2} & set(row.shape) or 1 in row.shape
