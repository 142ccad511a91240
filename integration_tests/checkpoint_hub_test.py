"""Checkpoints of KerasHub's families, between meshes, equal to the bit.

`KERAS_TP_HUB=llama,whisper` runs these alone.
"""

import os

import keras
import numpy as np
import pytest

from integration_tests import harness
from integration_tests import hub_backbones
from integration_tests import slow_tests
from integration_tests.checkpoints_test import under
from keras_tp import distribution
from keras_tp.backend import distribution_lib as lib

QUICK = ["llama", "vit"]
FAMILIES = [
    *("llama", "vit", "bert", "gpt2", "gemma", "mixtral", "t5", "whisper"),
    *("clip", "phi3", "DINOV2", "resnet"),
]
# These layers compute a variable from the one that they load, with rounding, as
# they do when plain Keras loads them.
COMPUTED = {"DINOV2": "embeddings/interpolated_position_embeddings"}


def names():
    given = os.environ.get("KERAS_TP_HUB")
    if given:
        return given.split(",")
    return FAMILIES if slow_tests.SLOW else QUICK


def shapes():
    """Returns a mesh of two devices, another split, and `None` for one."""
    if lib.num_processes() > 1:
        count = distribution.get_device_count()
        return [(1, count), (count, 1), None]
    return [(1, 2), (2, 2), None]


def made(name, seed):
    """Returns a model that is compiled with an optimizer that has slots."""
    builders, specs, _ = hub_backbones.survey()
    keras.utils.set_random_seed(seed)
    model = builders[name]()
    losses = keras.tree.map_structure(lambda _: "mse", model.output)
    is_task = hasattr(model, "backbone")
    kwargs = {"metrics": [], "weighted_metrics": []} if is_task else {}
    model.compile(keras.optimizers.Adam(1e-3), losses, **kwargs)
    return model, hub_backbones.inputs_of(model, specs.get(name))


def state_of(model):
    return {
        variable.path: np.array(keras.ops.convert_to_numpy(variable))
        for variable in (*model.weights, *model.optimizer.variables)
    }


@pytest.mark.parametrize("name", names())
def test_family(name, tmp_path):
    pytest.importorskip("keras_hub")
    source, *others = shapes()
    with under(source):
        model, x = made(name, 1)
        if name not in hub_backbones.NOT_TRAINED:
            outputs = model.predict_on_batch(x)
            targets = keras.tree.map_structure(np.zeros_like, outputs)
            model.train_on_batch(x, targets)
        else:
            model.optimizer.build(model.trainable_variables)
        distribution.save_checkpoint(tmp_path, model)
        expected = list(state_of(model).values())
        assert harness.split_paths(model)
    for shape in others:
        with under(shape):
            model, _ = made(name, 2)
            distribution.load_checkpoint(tmp_path, model)
        found = state_of(model)
        for (path, value), other in zip(found.items(), expected, strict=True):
            if path == COMPUTED.get(name):
                np.testing.assert_allclose(value, other, atol=1e-3)
                continue
            np.testing.assert_array_equal(value, other, err_msg=path)
