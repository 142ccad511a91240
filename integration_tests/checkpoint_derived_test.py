"""Files of adapters and of quantized models, between meshes.

The tests run in one process, and in each of several at once.
"""

import functools
import warnings

import keras
import numpy as np
import pytest
from keras import layers

from integration_tests import harness
from integration_tests import hub_models
from integration_tests import slow_tests
from integration_tests.checkpoints_test import under
from keras_tp import distribution
from keras_tp.backend import distribution_lib as lib
from keras_tp.backend.saving import digests

WORDS, LENGTH, WIDTH, HEADS, RANK = 24, 6, 16, 4, 2


def shapes():
    """Returns a mesh, another one, and `None` for one device."""
    count = distribution.get_device_count()
    if lib.num_processes() > 1:
        return [(1, count), (count, 1), None]
    return [(1, 4), (2, 2), None] if count > 1 else [None]


def arrays_of(variables):
    return [np.array(keras.ops.convert_to_numpy(v)) for v in variables]


def assert_same(found, expected):
    for value, other in zip(found, expected, strict=True):
        assert value.dtype == other.dtype
        np.testing.assert_array_equal(value, other)


def backbone():
    return hub_models.backbone(
        "Llama", **{**hub_models.GROUPED, "num_layers": 1}
    )


def adapters_of(model):
    return [v for v in model.weights if "lora" in v.path]


def path_of(shape, tmp_path):
    """Returns where a model is saved: plain ones by each process."""
    folder = tmp_path if shape else harness.own_folder(tmp_path)
    return str(folder / "adapters.lora.h5")


def saved_adapters(shape, tmp_path):
    """Saves adapters that are not zero; returns the path and the values."""
    keras.utils.set_random_seed(1)
    path = path_of(shape, tmp_path)
    with under(shape):
        model = backbone()
        model.enable_lora(RANK)
        for variable in adapters_of(model):
            variable.assign(keras.random.normal(variable.shape, seed=3))
    # After the scope.
    model.save_lora_weights(path)
    return path, arrays_of(adapters_of(model))


SLOW = functools.partial(pytest.param, marks=pytest.mark.slow)


@pytest.mark.parametrize("first", [0, SLOW(1)])
def test_adapters_alone(first, tmp_path):
    """From a mesh to another and to one device; and from one device."""
    pytest.importorskip("keras_hub")
    known = shapes()
    source = known[0] if first == 0 else known[-1]
    path, expected = saved_adapters(source, tmp_path)
    for shape in known[1:] if first == 0 else known[:1]:
        keras.utils.set_random_seed(2)
        with under(shape):
            model = backbone()
            model.load_lora_weights(path)
        assert len(adapters_of(model)) > 2
        assert_same(arrays_of(adapters_of(model)), expected)


def test_adapters_that_are_damaged(tmp_path):
    pytest.importorskip("keras_hub")
    shape = shapes()[0]
    path, _ = saved_adapters(shape, tmp_path)
    lib.meet("A test")
    if lib.process_id() == 0:
        with open(path, "r+b") as file:
            data = bytearray(file.read())
            data[len(data) // 2] ^= 1
            file.seek(0)
            file.write(data)
    lib.meet("A test")
    with under(shape):
        with pytest.raises(digests.UnreadableFileError):
            backbone().load_lora_weights(path)


def network(kind):
    """Returns a model after what a kind names was done to it."""
    inputs = keras.Input((LENGTH,), dtype="int32")
    x = layers.Embedding(WORDS, WIDTH, name="words")(inputs)
    x = layers.Dense(4 * WIDTH, activation="relu", name="up")(x)
    x = layers.Dense(WIDTH, name="down")(x)
    shape = (LENGTH, HEADS, WIDTH // HEADS)
    y = layers.EinsumDense("abc,cde->abde", shape, name="query")(x)
    shape = LENGTH, WIDTH
    y = layers.EinsumDense("abde,dec->abc", shape, name="output")(y)
    model = keras.Model(inputs, layers.Dense(8, name="head")(y))
    for step in kind.split(", "):
        if step == "lora":
            for name in ("words", "up", "query"):
                model.get_layer(name).enable_lora(RANK)
            continue
        with warnings.catch_warnings():
            # Of layers that have nothing to quantize.
            warnings.simplefilter("ignore")
            if step == "int4 in groups":
                model.quantize(
                    config=keras.quantizers.Int4QuantizationConfig(block_size=4)
                )
            else:
                model.quantize(step)
    model.compile(keras.optimizers.Adam(0.01), "mse")
    return model


def made(kind, seed):
    keras.utils.set_random_seed(seed)
    model = network(kind)
    if "lora" in kind:
        rng = np.random.default_rng(1)
        x = rng.integers(0, WORDS, (4, LENGTH))
        y = rng.standard_normal((4, LENGTH, 8), "float32")
        model.train_on_batch(x, y)
    return model


def state_of(model):
    return arrays_of([*model.weights, *model.optimizer.variables])


@pytest.mark.parametrize(
    "kind",
    [
        *(SLOW("int8"), SLOW("int4"), "int4 in groups"),
        *("int8, lora", SLOW("lora")),
    ],
)
def test_what_was_quantized(kind, tmp_path):
    """Kernels, scales and slots of each mesh on each, and outputs."""
    x = np.random.default_rng(0).integers(0, WORDS, (4, LENGTH))
    # CI has time for one of them.
    sources = shapes() if slow_tests.SLOW else shapes()[:1]
    for index, source in enumerate(sources):
        folder = tmp_path / str(index)
        with under(source):
            model = made(kind, 1)
            distribution.save_checkpoint(folder, model)
            expected, outputs = state_of(model), model.predict(x, verbose=0)
        assert "lora" == kind or any(v.dtype == "int8" for v in expected)
        for shape in shapes():
            if index and shape not in (None, shapes()[0]):
                continue
            with under(shape):
                other = made(kind, 2)
                distribution.load_checkpoint(folder, other)
                found = other.predict(x, verbose=0)
            assert_same(state_of(other), expected)
            if shape == source:
                np.testing.assert_array_equal(found, outputs)
            np.testing.assert_allclose(found, outputs, rtol=1e-5, atol=1e-6)
