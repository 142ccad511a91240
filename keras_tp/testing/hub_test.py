"""Models of KerasHub, if it is installed."""

import keras
import numpy as np
import pytest

from keras_tp import backend
from keras_tp import distribution
from keras_tp.testing import models

keras_hub = pytest.importorskip("keras_hub", reason="KerasHub is not installed")

LENGTH, PROMPT, WORDS = 8, 3, 40
RNG = np.random.default_rng(3)
TOKENS = RNG.integers(1, WORDS, (2, LENGTH)).astype("int32")
PADDING = np.tile(np.arange(LENGTH) < PROMPT, (2, 1)).astype("int32")


def backbone():
    return keras_hub.models.GPT2Backbone(
        vocabulary_size=WORDS,
        num_layers=2,
        num_heads=models.HEADS,
        hidden_dim=models.WIDTH,
        intermediate_dim=4 * models.WIDTH,
        max_sequence_length=LENGTH,
    )


def planned():
    return distribution.TensorParallel(models.mesh())


def built(build):
    """Returns a model with large weights, so that its tokens differ."""
    keras.utils.clear_session()
    keras.utils.set_random_seed(1)
    model = build()
    rng = np.random.default_rng(2)
    for variable in model.weights:
        variable.assign(rng.normal(size=variable.shape).astype("float32"))
    return model


def generator():
    model = keras_hub.models.GPT2CausalLM(backbone(), preprocessor=None)
    model.compile(sampler="greedy")
    return model


def test_the_tokens_of_one_device():
    def generated(model):
        prompt = {"token_ids": TOKENS, "padding_mask": PADDING}
        found = model.generate(prompt, stop_token_ids=None)
        return np.asarray(found["token_ids"])

    expected = generated(built(generator))
    assert (expected[:, PROMPT:] != TOKENS[:, PROMPT:]).any()
    parallel = planned()
    with parallel.scope():
        model = built(generator)
    make, seen = model.make_generate_function, []

    def noted():
        seen.append(distribution.distribution())
        return make()

    model.make_generate_function = noted
    np.testing.assert_array_equal(generated(model), expected)
    assert models.split(model)
    # Used after the scope, and still under its own distribution.
    assert seen == [parallel]


def test_adapters(tmp_path):
    path = tmp_path / "adapters.lora.h5"

    def adapted():
        model = backbone()
        model.enable_lora(2)
        return model

    with planned().scope():
        model, other = built(adapted), adapted()
        model.save_lora_weights(path)
        other.load_lora_weights(path)
        assert models.split(model)
    adapters = [v for v in model.weights if "lora_kernel" in v.path]
    assert adapters
    loaded = {v.path: v for v in other.weights}
    for variable in adapters:
        found = keras.ops.convert_to_numpy(loaded[variable.path])
        expected = keras.ops.convert_to_numpy(variable)
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("form", ["own", "huggingface"])
def test_a_preset(form, tmp_path):
    if form == "huggingface":
        # KerasHub imports it to write one.
        pytest.importorskip("sentencepiece")
    folder = str(tmp_path / "preset")
    plain = built(backbone)
    lib = backend.distribution_lib
    if lib.process_id() == 0:
        if form == "own":
            plain.save_to_preset(folder)
        else:
            plain.export_to_transformers(folder)
    lib.meet("The preset")
    with planned().scope():
        model = keras_hub.models.GPT2Backbone.from_preset(folder)
        found = models.values(model)
    assert models.split(model)
    models.assert_close(found, models.values(plain), 0)
