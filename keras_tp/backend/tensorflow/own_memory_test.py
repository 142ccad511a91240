"""Values in memory that TensorFlow does not keep."""

import os
import pathlib
import subprocess
import sys

import keras
import ml_dtypes
import numpy as np
import pytest

if keras.config.backend() != "tensorflow":
    pytest.skip("DTensor", allow_module_level=True)

import tensorflow as tf

from keras_tp import distribution
from keras_tp.backend.tensorflow import own_memory

ROOT = pathlib.Path(__file__).parents[3]
# Each part of a kernel has 8 MiB. A backward pass reads the value of a kernel
# while its new value takes the place, so the loaded one is freed in a step.
SCRIPT = """
import sys

import keras
import numpy as np

from keras_tp import distribution

mesh = distribution.DeviceMesh((1, 2), ["batch", "model"], ["cpu:0", "cpu:1"])
layout_map = distribution.LayoutMap(mesh)
layout_map["up.*/kernel"] = (None, "model")
layout_map["down.*/kernel"] = ("model", None)
with distribution.ModelParallel(layout_map=layout_map).scope():
    x = inputs = keras.Input((1024,))
    for index in range(4):
        x = keras.layers.Dense(4096, name=f"up_{index}")(x)
        x = keras.layers.Dense(1024, name=f"down_{index}")(x)
    model = keras.Model(inputs, x)
    model.compile("sgd", "mse")
    model.save(sys.argv[1])
    model = keras.saving.load_model(sys.argv[1])
    x = np.ones((1024, 1024), "float32")
    model.fit(x, x, batch_size=256, verbose=0)
"""


@pytest.mark.parametrize(
    "dtype",
    ["float32", "float16", "float64", "int32", "uint8", ml_dtypes.bfloat16],
)
@pytest.mark.parametrize("size", [7, 1100])
def test_values(size, dtype):
    dtype = np.dtype(dtype)
    value = np.arange(size * 1031).reshape(size, 1031).astype(dtype)
    tensor = own_memory.tensor_of(value.T)
    assert tensor.dtype == tf.as_dtype(dtype)
    np.testing.assert_array_equal(tensor.numpy(), value.T)
    np.testing.assert_array_equal((tensor + tensor).numpy(), (value + value).T)
    zeros = own_memory.zeros([size, 1031], dtype)
    assert zeros.dtype == tensor.dtype
    np.testing.assert_array_equal(zeros.numpy(), np.zeros((size, 1031), dtype))


def test_a_tensor_outlives_the_array_it_was_made_of():
    tensors = []
    for index in range(4):
        tensors.append(own_memory.tensor_of(np.full((512, 1024), index, "f")))
    for index, tensor in enumerate(tensors):
        assert (tensor.numpy() == index).all()
    kept = tensors.pop() + 1
    assert (kept.numpy() == 4).all()


def test_a_step_that_frees_loaded_values_ends(tmp_path):
    environment = dict(os.environ)
    environment.pop("XLA_FLAGS", None)
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path / "model.keras")],
        env={
            **environment,
            "KERAS_TP_CPU_DEVICES": "2",
            "PYTHONPATH": str(ROOT),
        },
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr[-2000:]


def test_loaded_values_replace_first_ones_in_memory_of_their_own(tmp_path):
    mesh = distribution.DeviceMesh(
        (1, 2), ["batch", "model"], distribution.list_devices()[:2]
    )
    layout_map = distribution.LayoutMap(mesh)
    layout_map["kernel"] = (None, "model")
    path = tmp_path / "model.weights.h5"
    with distribution.ModelParallel(layout_map=layout_map).scope():
        model = keras.Sequential([keras.layers.Dense(1024, use_bias=False)])
        model.build((None, 1024))
        value = model.layers[0].kernel._value
        first = value.numpy()
        model.save_weights(path)
        assert value.has_own_memory()
        model.load_weights(path)
        assert value.has_own_memory()
        np.testing.assert_array_equal(value.numpy(), first)
        # Memory that TensorFlow has given to a step goes back to TensorFlow.
        value.assign(2 * first)
        assert not value.has_own_memory()
        model.load_weights(path)
        assert not value.has_own_memory()
        np.testing.assert_array_equal(value.numpy(), first)


def test_a_variable_that_is_made_while_a_function_is_traced():
    mesh = distribution.DeviceMesh(
        (1, 2), ["batch", "model"], distribution.list_devices()[:2]
    )
    layout_map = distribution.LayoutMap(mesh)
    layout_map["kernel"] = (None, "model")
    with distribution.ModelParallel(layout_map=layout_map).scope():
        model = keras.Sequential([keras.layers.Dense(1024, use_bias=False)])
        step = tf.function(lambda x: model(x))
        outputs = step(np.ones((2, 1024), "float32"))
        kernel = model.layers[0].kernel
        assert kernel._value.has_own_memory()
        np.testing.assert_allclose(
            outputs[0], kernel.numpy().sum(0), rtol=1e-3, atol=1e-4
        )
