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


OPTIMIZERS = {
    "accumulation": lambda: keras.optimizers.Adam(
        0.01, gradient_accumulation_steps=2
    ),
    "clipping": lambda: keras.optimizers.Adam(0.01, global_clipnorm=0.1),
    "averages": lambda: keras.optimizers.SGD(
        0.01, use_ema=True, ema_overwrite_frequency=2
    ),
    "factored": lambda: keras.optimizers.Adafactor(0.01),
    "matrices": lambda: keras.optimizers.Muon(0.01),
    "scaled": lambda: keras.optimizers.LossScaleOptimizer(
        keras.optimizers.SGD(0.01)
    ),
}


def network():
    """A transformer block on float inputs.

    Plain Keras on TensorFlow updates a table by its rows.
    """
    keras.utils.clear_session()
    keras.utils.set_random_seed(1)
    layers = keras.layers
    inputs = keras.Input((8, 16))
    y = layers.LayerNormalization()(inputs)
    # The gradient of the keys' bias is rounding alone, which Adam scales.
    x = inputs + layers.MultiHeadAttention(4, 4, use_bias=False)(y, y)
    y = layers.LayerNormalization()(x)
    y = layers.Dense(16)(layers.Dense(32, activation="gelu")(y))
    return keras.Model(inputs, x + y)


@harness.shapes((2, 2))
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.slow
def test_optimizers(name, shape):
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((2, BATCH, 8, 16)).astype("float32")

    def train():
        model = network()
        model.compile(OPTIMIZERS[name](), "mse")
        return model, [float(model.train_on_batch(x, y)) for _ in range(4)]

    harness.assert_plain()
    plain, expected = train()
    want = harness.weights_of(plain)
    parallel = distribution.TensorParallel(
        harness.mesh(shape), sequence_parallel=True, fully_shard=True
    )
    with parallel.scope():
        model, losses = train()
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    for path, value in harness.weights_of(model).items():
        np.testing.assert_allclose(value, want[path], atol=1e-5, err_msg=path)


@harness.shapes((2, 2))
@pytest.mark.slow
def test_files_and_generated_tokens(shape, tmp_path):
    x, _ = hub_models.data(build("llama"), BATCH)
    x["padding_mask"][:, 6:] = 0
    parallel = distribution.TensorParallel(
        harness.mesh(shape), sequence_parallel=True, fully_shard=True
    )
    with parallel.scope():
        model = build("llama")
    # Tokens of large weights do not depend on rounding.
    rng = np.random.default_rng(2)
    for variable in model.weights:
        variable.assign(rng.normal(size=variable.shape).astype("float32"))
    model.save_weights(tmp_path / "llama.weights.h5")
    plain = build("llama")
    plain.load_weights(tmp_path / "llama.weights.h5")
    for path, value in harness.weights_of(model).items():
        np.testing.assert_array_equal(value, harness.weights_of(plain)[path])
    tokens = []
    for each in (model, plain):
        each.compile(sampler="greedy")
        found = each.generate(dict(x), stop_token_ids=None)
        tokens.append(np.asarray(found["token_ids"]))
    np.testing.assert_array_equal(*tokens)
