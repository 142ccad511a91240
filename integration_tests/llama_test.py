"""Llama: columns and rows, heads of keys and values, a layer by hand.

README.md of this folder names the row that each test shows.
"""

import keras
import numpy as np
import pytest

from integration_tests import faults_test
from integration_tests import harness
from integration_tests import zoo
from keras_tp import TensorParallelKeras
from keras_tp import distribution

BATCH, FEATURES, UNITS = 6, faults_test.FEATURES, faults_test.UNITS


def rows_of(name, devices):
    harness.mesh((devices,), ["model"])
    model = TensorParallelKeras(
        harness.build(zoo.CASES[name]), world_size=devices
    )
    return {
        row.path: row
        for row in distribution.describe(model).rows
        if row.role == "weight"
    }


@harness.shapes((2,), (4,))
def test_columns_and_rows(shape):
    """Dims are (in, heads, size), (heads, size, out), (in, out)."""
    rows = rows_of("llama", *shape)
    for block in range(zoo.HUB_LAYERS):
        for name in ("query", "key", "value"):
            row = rows[
                f"transformer_layer_{block}/self_attention/{name}/kernel"
            ]
            assert row.axes == (None, "model", None)
        row = rows[
            f"transformer_layer_{block}/self_attention/attention_output/kernel"
        ]
        assert row.axes == ("model", None, None)
        for name in ("gate", "intermediate"):
            row = rows[
                f"transformer_layer_{block}/feedforward_{name}_dense/kernel"
            ]
            assert row.axes == (None, "model")
        row = rows[f"transformer_layer_{block}/feedforward_output_dense/kernel"]
        assert row.axes == ("model", None)


def test_fewer_heads_of_keys_and_values_than_devices():
    """Two of them on four devices or more are whole, and that is told."""
    devices = distribution.get_device_count()
    rows = rows_of("mistral", devices)
    for name in ("key", "value"):
        row = rows[f"transformer_layer_0/self_attention/{name}/kernel"]
        if devices == 2:
            assert row.axes == (None, "model", None)
        else:
            assert not row.is_split
            assert "2" in row.why
    assert rows["transformer_layer_0/self_attention/query/kernel"].is_split


def test_all_devices_hold_their_part_of_the_split_weights():
    """Eight of them on JAX and TensorFlow."""
    devices = distribution.get_device_count()
    rows = rows_of("llama", devices).values()
    split = [row for row in rows if row.is_split]
    assert len(split) >= 10
    for row in split:
        held = dict.fromkeys(distribution.list_devices(), row.bytes // devices)
        assert row.device_bytes == held


def by_layers():
    inputs = keras.Input((FEATURES,))
    x = zoo.dense(UNITS, "up", activation="relu")(inputs)
    model = keras.Model(inputs, zoo.dense(FEATURES, "down")(x), name="pair")
    model.compile(keras.optimizers.SGD(0.1), "mse")
    return model


def by_hand(devices):
    inputs = keras.Input(batch_shape=(BATCH, FEATURES))
    x = faults_test.Pair(devices, "pair")(inputs)
    model = keras.Model(inputs, x, name="by_hand")
    model.compile(keras.optimizers.SGD(0.1), "mse")
    return model


def parts_of(kernel, devices, dim):
    return np.stack(np.split(keras.ops.convert_to_numpy(kernel), devices, dim))


@harness.shapes((1, 2), (1, 4))
def test_a_layer_written_by_hand_equals_the_plan(shape):
    devices = shape[1]
    keras.utils.set_random_seed(1)
    plain = by_layers()
    values = plain.get_weights()
    model = by_layers()
    model.set_weights(values)
    TensorParallelKeras(model, world_size=devices)
    assert {"up/kernel", "down/kernel"} <= harness.split_paths(model)
    layouts = {"pair/(up|down)": ("model", None, None)}
    with harness.model_parallel(layouts, shape).scope():
        own = by_hand(devices)
    layer = own.get_layer("pair")
    # It has no bias between the two.
    plain.get_layer("up").bias.assign(np.zeros(UNITS, "float32"))
    model.get_layer("up").bias.assign(np.zeros(UNITS, "float32"))
    plain.get_layer("up").bias.trainable = False
    model.get_layer("up").bias.trainable = False
    layer.up.assign(parts_of(values[0], devices, 1))
    layer.down.assign(parts_of(values[2], devices, 0))
    layer.bias.assign(values[3])
    rng = np.random.default_rng(0)
    x = rng.standard_normal((BATCH, FEATURES), "float32")
    for each in (plain, model, own):
        each.compile(keras.optimizers.SGD(0.1), "mse")
    found = [
        [np.ravel(each.train_on_batch(x, np.tanh(x)))[0] for _ in range(5)]
        for each in (plain, model, own)
    ]
    assert found[0][-1] < 0.9 * found[0][0]
    for losses in found[1:]:
        np.testing.assert_allclose(losses, found[0], rtol=1e-5)
    for path, want, dim in (("up", 0, 1), ("down", 2, 0)):
        np.testing.assert_allclose(
            keras.ops.convert_to_numpy(getattr(layer, path)),
            parts_of(plain.get_weights()[want], devices, dim),
            atol=1e-5,
        )


@pytest.mark.parametrize("size", [3, 5])
def test_heads_that_do_not_divide_are_named(size):
    devices = distribution.get_device_count()
    layout_map = distribution.LayoutMap(harness.mesh((1, devices)))
    layout_map["up/kernel"] = (None, "model")
    with distribution.ModelParallel(layout_map=layout_map).scope():
        with pytest.raises(ValueError) as error:
            keras.layers.Dense(size, name="up").build((None, 4))
    for word in ("up/kernel", "Dim 1", f"size {size}", f"size {devices}"):
        assert word in str(error.value)
