"""Tensor, sequence and fully sharded data parallelism in one training."""

import keras
import numpy as np
import pytest

from integration_tests import harness
from integration_tests import hub_models
from keras_tp import distribution

pytest.importorskip("keras_hub")
BATCH, STEPS = 4, 3
# Sequence parallelism warns for the images, whose patches and class token are
# an odd number of positions.
NAMES = ["llama", "gemma3", "mixtral", "bert", "vit"]


def build(name):
    if name != "gemma3":
        return hub_models.build(name)
    keras.utils.set_random_seed(1)
    backbone = hub_models.backbone(
        "Gemma3", **hub_models.GROUPED, image_size=16, head_dim=16
    )
    task = hub_models.models().Gemma3CausalLM
    return task(backbone=backbone, preprocessor=None)


def trained(name):
    """Returns a model after some steps, its losses and its last outputs."""
    keras.utils.clear_session()
    model = build(name)
    x, _ = hub_models.data(model, BATCH)
    outputs = model.predict(x, verbose=0)
    rng = np.random.default_rng(3)
    y = keras.tree.map_structure(
        lambda a: rng.standard_normal(a.shape, "float32"), outputs
    )
    # The gradients of random targets are large.
    metrics = {"metrics" if name == "vit" else "weighted_metrics": []}
    model.compile(keras.optimizers.SGD(1e-3), "mse", **metrics)
    losses = [np.ravel(model.train_on_batch(x, y))[0] for _ in range(STEPS)]
    return model, losses, model.predict(x, verbose=0)


@harness.shapes((2, 2))
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name == "llama" else pytest.mark.slow)
        for name in NAMES
    ],
)
def test_losses_are_those_of_one_device(name, shape):
    harness.assert_plain()
    _, expected, outputs = trained(name)
    parallel = distribution.TensorParallel(
        harness.mesh(shape), sequence_parallel=True, fully_shard=True
    )
    with parallel.scope():
        model, losses, found = trained(name)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    keras.tree.map_structure(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), found, outputs
    )
    rows = [r for r in distribution.describe(model).rows if r.role == "weight"]
    held = sum(max(row.device_bytes.values()) for row in rows)
    # Not all biases divide by all devices.
    assert held <= 1.1 * sum(row.bytes for row in rows) / np.prod(shape)
