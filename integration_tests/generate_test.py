"""KerasHub's `generate` on models that are split: the tokens of one device."""

import importlib
import os

import keras
import numpy as np
import pytest

from integration_tests import harness
from integration_tests import hub_models
from keras_tp import TensorParallelKeras
from keras_tp import distribution

BACKEND = keras.config.backend()
LENGTH = 12
PROMPT = 4
# Learned positions, both ways to attend to grouped heads of keys, and rotary
# positions.
NAMES = ["opt", "gpt2", "llama_grouped", "gemma"]
SHAPES = harness.shapes((2,), (4,))


def prompt(rows=4):
    rng = np.random.default_rng(2)
    tokens = rng.integers(1, hub_models.VOCABULARY, (rows, LENGTH))
    mask = np.arange(LENGTH) < PROMPT
    return {
        "token_ids": tokens.astype("int32"),
        "padding_mask": np.tile(mask, (rows, 1)).astype("int32"),
    }


def built(name, sampler="greedy"):
    """Returns a task whose tokens differ from one another."""
    keras.utils.clear_session()
    keras.utils.set_random_seed(1)
    model = hub_models.build(name)
    rng = np.random.default_rng(2)
    for variable in model.weights:
        value = rng.normal(size=variable.shape)
        variable.assign(value.astype("float32"))
    if sampler == "top_k":
        sampler = importlib.import_module("keras_hub").samplers.TopKSampler(
            k=20, seed=3
        )
    model.compile(sampler=sampler)
    return model


def generated(model, **kwargs):
    tokens = model.generate(prompt(), **{"stop_token_ids": None, **kwargs})
    return np.asarray(tokens["token_ids"])


@pytest.mark.parametrize("name", NAMES)
@SHAPES
def test_tokens_are_those_of_one_device(name, shape):
    plain = built(name)
    expected = generated(plain)
    assert len(np.unique(expected[:, PROMPT:])) >= 3
    assert (expected[:, PROMPT:] != prompt()["token_ids"][:, PROMPT:]).any()
    # Split when it is built, and not inside of the scope any more.
    with distribution.TensorParallel(harness.mesh(shape, ["model"])).scope():
        born = built(name)
    assert harness.split_paths(born)
    np.testing.assert_array_equal(generated(born), expected)
    # Compiled for one device, and split afterwards.
    TensorParallelKeras(plain, world_size=shape[0])
    np.testing.assert_array_equal(generated(plain), expected)


def test_the_distribution_of_the_model_is_entered():
    parallel = distribution.TensorParallel(
        harness.mesh(harness.fitted((2,)), ["model"])
    )
    with parallel.scope():
        model = built("opt")
    make, seen = model.make_generate_function, []

    def noted():
        seen.append(distribution.distribution())
        return make()

    model.make_generate_function = noted
    generated(model)
    assert seen == [parallel]
    assert distribution.distribution() is None


@pytest.mark.skipif(BACKEND != "tensorflow", reason="XLA cannot run DTensor")
def test_jit_compile_is_turned_off():
    plain = built("opt")
    expected = generated(plain)
    mesh = harness.mesh(harness.fitted((2,)), ["model"])
    with distribution.TensorParallel(mesh).scope():
        model = built("opt")
        model.compile(sampler="greedy", jit_compile=True)
    with pytest.warns(UserWarning, match="does not support `jit_compile=True`"):
        found = generated(model)
    np.testing.assert_array_equal(found, expected)


@harness.shapes((2, 2))
def test_tokens_on_a_mesh_that_splits_the_batch(shape):
    expected = generated(built("llama_grouped"))
    with distribution.TensorParallel(harness.mesh(shape)).scope():
        model = built("llama_grouped")
    np.testing.assert_array_equal(generated(model), expected)
    stop = [int(expected[0, PROMPT + 2])]
    assert expected[0, PROMPT] not in stop
    keras.utils.clear_session()
    plain = built("llama_grouped")
    np.testing.assert_array_equal(
        generated(model, stop_token_ids=stop),
        generated(plain, stop_token_ids=stop),
    )


@SHAPES
def test_tokens_that_are_drawn(shape):
    """From the same seed; TensorFlow's own depend on its threads."""
    expected = generated(built("opt", "top_k"))
    drawn = []
    for devices in (shape, (1,)) if BACKEND == "tensorflow" else (shape,):
        mesh = harness.mesh(devices, ["model"])
        with distribution.TensorParallel(mesh).scope():
            model = built("opt", "top_k")
        drawn.append(generated(model))
        # The next ones are others.
        assert (generated(model) != drawn[-1]).any()
    if BACKEND != "tensorflow":
        drawn.append(expected)
    np.testing.assert_array_equal(*drawn)
    assert (drawn[0] != generated(built("opt"))).any()


def part_of_cache(model, tokens):
    """Returns the shape of a cache of keys and values, and that of a part."""
    if BACKEND == "tensorflow":
        placement = importlib.import_module(
            "keras_tp.backend.tensorflow.placement"
        )
        mesh = distribution.distribution().device_mesh.backend_mesh
        boundary = importlib.import_module(
            "keras_tp.backend.tensorflow.boundary"
        )
        tokens = boundary.place_batch(tokens, mesh, None)
        with placement.on_mesh(mesh):
            _, cache = model._build_cache(tokens)
        (_, _, part), *_ = placement.local_parts(cache)
        return tuple(cache.shape), part.shape
    _, cache = model._build_cache(keras.ops.convert_to_tensor(tokens))
    if BACKEND == "torch":
        return tuple(cache.shape), tuple(cache.to_local().shape)
    return cache.shape, cache.addressable_shards[0].data.shape


@pytest.mark.parametrize("name", ["opt", "llama_grouped"])
def test_the_cache_is_split_by_heads(name):
    shape = harness.fitted((2,))
    if shape != (2,):
        pytest.skip("needs two heads of keys for each device")
    parallel = distribution.TensorParallel(harness.mesh(shape, ["model"]))
    with parallel.scope():
        model = built(name)
        whole, part = part_of_cache(model, prompt()["token_ids"])
    # Batch, layers, keys and values, positions, heads, and their size.
    assert whole[:4] == (4, hub_models.LAYERS, 2, LENGTH)
    assert part == (*whole[:4], whole[4] // 2, whole[5])


@pytest.mark.skipif(
    "RANK" in os.environ, reason="a process of its own: one is enough"
)
def test_keras_hub_may_be_imported_after_the_distribution_is_set():
    code = """
import numpy as np
from keras_tp import distribution
mesh = distribution.DeviceMesh((1,), ["model"], ["cpu:0"])
distribution.set_distribution(distribution.TensorParallel(mesh))
from integration_tests import hub_models
model = hub_models.build("opt")
from keras_hub.src.models.causal_lm import CausalLM
assert CausalLM.generate.__wrapped__
"""
    import subprocess
    import sys

    result = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": os.getcwd()},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr[-3000:]
