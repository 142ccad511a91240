"""Compiled steps: few graphs, the collectives and the numbers of eager ones."""

import collections
import functools

import keras
import numpy as np
import pytest
from keras import layers

if keras.config.backend() != "torch":
    pytest.skip("compiled steps on torch", allow_module_level=True)

import torch
from torch.distributed.tensor import Replicate
from torch.distributed.tensor import Shard
from torch.distributed.tensor import _utils

import keras_tp
from keras_tp import distribution
from keras_tp.backend.torch import compiling
from keras_tp.backend.torch import placement

VOCABULARY, WIDTH, LENGTH, BATCH = 20, 8, 6, 4
LAYOUTS = {
    ".*tokens/embeddings": ("model", None),
    ".*(query|key|value)/kernel": (None, "model", None),
    ".*(query|key|value)/bias": ("model", None),
    ".*attention_output/kernel": ("model", None, None),
    ".*(up|logits)/kernel": (None, "model"),
    ".*(up|logits)/bias": ("model",),
    ".*down/kernel": ("model", None),
}


@pytest.fixture(autouse=True)
def without_inductor(monkeypatch):
    try:
        compiling.check_compiler()
    except RuntimeError as e:
        pytest.skip(str(e))
    # The graphs are the same, and they need no C++ compiler.
    compile = functools.partial(torch.compile, backend="aot_eager")
    monkeypatch.setattr(torch, "compile", compile)
    forget()
    yield
    distribution.set_distribution(None)
    keras_tp.uninstall()
    keras.utils.clear_session()
    torch._dynamo.reset()


def forget():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


def model_parallel():
    count = distribution.get_device_count()
    if count < 2:
        pytest.skip("needs several processes")
    mesh = distribution.DeviceMesh((1, count), ["batch", "model"])
    layout_map = distribution.LayoutMap(mesh)
    for pattern, axes in LAYOUTS.items():
        layout_map[pattern] = axes
    return distribution.ModelParallel(layout_map=layout_map)


def decoder(**arguments):
    keras.utils.set_random_seed(1)
    inputs = keras.Input((LENGTH,), dtype="int32")
    x = layers.Embedding(VOCABULARY, WIDTH, name="tokens")(inputs)
    y = layers.LayerNormalization()(x)
    x += layers.MultiHeadAttention(4, 2)(y, y, use_causal_mask=True)
    y = layers.Dense(16, "gelu", name="up")(x)
    x += layers.Dense(WIDTH, name="down")(y)
    model = keras.Model(inputs, layers.Dense(VOCABULARY, name="logits")(x))
    model.compile(
        keras.optimizers.Adam(0.01),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
        **arguments,
    )
    return model


def batch(size=BATCH):
    rng = np.random.default_rng(0)
    x = rng.integers(VOCABULARY, size=(size, LENGTH)).astype("int32")
    return x, np.roll(x, -1, axis=1)


def losses(model, size=BATCH, steps=3):
    return [model.train_on_batch(*batch(size)) for _ in range(steps)]


def breaks():
    """The reasons of graph breaks, and the number of compiled frames."""
    counters = torch._dynamo.utils.counters
    reasons = [text.splitlines()[0] for text in counters["graph_break"]]
    return reasons, counters["frames"]["total"]


def collectives(model):
    """Name -> number of the collectives of a step, as torch's profiler has."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities) as profile:
        model.train_on_batch(*batch())
    names = (event.name for event in profile.events())
    return collections.Counter(n for n in names if n.startswith("c10d::"))


def test_a_train_step():
    plain = decoder()
    expected = losses(plain, steps=4)[:3] + losses(plain, BATCH + 1)
    with model_parallel().scope():
        eager = decoder()
        losses(eager)
        forget()
        model = decoder(jit_compile=True)
        actual = losses(model)
        # The step, its part before the break (again when there are
        # gradients), and the part after it.
        assert breaks() == (["Unsupported Tensor.backward() call"], 4)
        counts = collectives(eager)
        assert counts["c10d::allreduce_"]
        assert collectives(model) == counts
        # The fourth step was profiled.
        actual += losses(model, BATCH + 1)
        np.testing.assert_allclose(actual, expected, rtol=1e-5)
        assert len(breaks()[0]) == 1


def test_evaluate_and_predict():
    x, y = batch()
    plain = decoder()
    expected = plain.evaluate(x, y, verbose=0), plain.predict(x, verbose=0)
    with model_parallel().scope():
        model = decoder(jit_compile=True)
        # A first call in `predict` breaks the graph at each layer. `evaluate`
        # calls the model to make the metrics, before it compiles.
        actual = model.evaluate(x, y, verbose=0), model.predict(x, verbose=0)
        for a, b in zip(actual, expected):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
        with pytest.raises(RuntimeError, match="outside of its table"):
            model.predict(x + VOCABULARY, verbose=0)
    assert breaks()[0] == []


def test_without_a_distribution_the_hooks_break_nothing():
    """As in plain Keras, which also breaks the graph at attention.

    What torch's compiler knows of functions it looks up once in a process, so
    that plain Keras cannot be compared here.
    """
    keras_tp.install()
    model = keras.Sequential([keras.Input((3,)), layers.Dense(2)])
    model.compile("adam", "mse", jit_compile=True)
    model.fit(np.ones((8, 3)), np.ones((8, 2)), batch_size=4, verbose=0)
    assert breaks()[0] == ["Unsupported Tensor.backward() call"]


@pytest.mark.parametrize("placed", [Replicate(), Shard(0), Shard(1)])
@pytest.mark.parametrize("size", [2, 5, 7, 8])
def test_the_extent_of_a_part(size, placed):
    mesh = model_parallel().device_mesh.backend_mesh
    shape, start = placement.extent((size, 9), mesh, [placed])
    expected = _utils.compute_local_shape_and_global_offset(
        torch.Size((size, 9)), mesh, [placed]
    )
    assert (tuple(shape), tuple(start)) == expected
