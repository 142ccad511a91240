"""Presets of KerasHub: each process reads the parts that it holds."""

import keras
import numpy as np
import pytest

from integration_tests import harness
from keras_tp import distribution
from keras_tp.backend import distribution_lib as lib

keras_hub = pytest.importorskip("keras_hub")

SIZES = dict(
    vocabulary_size=51,
    num_layers=2,
    num_query_heads=4,
    num_key_value_heads=2,
    hidden_dim=16,
    intermediate_dim=64,
)
BUILDERS = {
    "llama3": lambda: keras_hub.models.Llama3Backbone(
        **SIZES, tie_word_embeddings=True
    ),
    "mistral": lambda: keras_hub.models.MistralBackbone(**SIZES),
    "gemma": lambda: keras_hub.models.GemmaBackbone(
        **{**SIZES, "num_key_value_heads": 1}, head_dim=8
    ),
    "gpt2": lambda: keras_hub.models.GPT2Backbone(
        vocabulary_size=51,
        num_layers=2,
        num_heads=4,
        hidden_dim=16,
        intermediate_dim=64,
        max_sequence_length=8,
    ),
}


def save(backbone, folder, form):
    """Saves a preset in one process, in one of KerasHub's forms."""
    if lib.process_id() == 0:
        if form == "huggingface":
            backbone.export_to_transformers(folder)
        else:
            size = {"one file": 10, "several files": 2e-5}[form]
            backbone.save_to_preset(folder, max_shard_size=size)
    lib.meet("The preset")


def tokens():
    ids = np.random.default_rng(0).integers(0, 51, (2, 6))
    return {"token_ids": ids, "padding_mask": np.ones((2, 6), "int32")}


@pytest.mark.parametrize(
    "family, form",
    [
        ("llama3", "huggingface"),
        ("gpt2", "huggingface"),
        ("mistral", "one file"),
        ("gpt2", "several files"),
        pytest.param("gemma", "huggingface", marks=pytest.mark.slow),
        pytest.param("gemma", "one file", marks=pytest.mark.slow),
        pytest.param("mistral", "several files", marks=pytest.mark.slow),
    ],
)
def test_a_preset_is_read_in_parts(family, form, tmp_path, copied):
    keras.utils.set_random_seed(7)
    plain = BUILDERS[family]()
    folder = str(tmp_path / "preset")
    save(plain, folder, form)
    plain = type(plain).from_preset(folder)
    copied.clear()
    mesh = harness.mesh(harness.fitted((1, 2)))
    with distribution.TensorParallel(mesh, strict=False).scope():
        split = type(plain).from_preset(folder)
        held = [
            read().nbytes
            for variable in split.weights
            for _, _, read in lib.variable_parts(variable)
        ]
        assert 0 < sum(copied) <= sum(held)
        # The largest, a table that is split, was not read as a whole.
        assert max(copied) <= max(held)
        assert any("model" in (v._layout.axes) for v in split.weights)
        for new, old in zip(split.weights, plain.weights, strict=True):
            np.testing.assert_array_equal(
                keras.ops.convert_to_numpy(new), keras.ops.convert_to_numpy(old)
            )
        found = keras.ops.convert_to_numpy(split.predict(tokens(), verbose=0))
    expected = plain.predict(tokens(), verbose=0)
    np.testing.assert_allclose(found, expected, atol=2e-6)


def test_a_damaged_preset_is_named(tmp_path):
    folder = tmp_path / "preset"
    save(BUILDERS["gpt2"](), str(folder), "huggingface")
    if lib.process_id() == 0:
        path = folder / "model.safetensors"
        path.write_bytes(path.read_bytes()[:-8])
    lib.meet("The damage")
    mesh = harness.mesh(harness.fitted((1, 2)))
    with distribution.TensorParallel(mesh, strict=False).scope():
        with pytest.raises(ValueError, match="model.safetensors"):
            keras_hub.models.GPT2Backbone.from_preset(str(folder))
