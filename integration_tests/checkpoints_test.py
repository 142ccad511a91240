"""A sharded checkpoint: saved on one mesh, loaded on another, and elsewhere."""

import contextlib
import json
import os

import keras
import numpy as np
import pytest
import safetensors
from keras import layers

import keras_tp
from integration_tests import harness
from keras_tp import distribution
from keras_tp.backend import distribution_lib as lib
from keras_tp.backend.saving import checkpoint_folder
from keras_tp.backend.saving import digests

BACKEND = keras.config.backend()
WORDS, LENGTH, WIDTH = 51, 8, 16
INDEX = checkpoint_folder.INDEX


class Fused(layers.Layer):
    """Attention with one kernel for queries, keys and values."""

    def build(self, shape):
        self.qkv = layers.Dense(3 * WIDTH, name="qkv")
        self.qkv.build(shape)
        self.out = layers.Dense(WIDTH, name="out")
        self.out.build(shape)

    def call(self, x):
        q, k, v = keras.ops.split(self.qkv(x), 3, axis=-1)
        heads = (-1, LENGTH, 4, WIDTH // 4)
        q, k, v = (keras.ops.reshape(y, heads) for y in (q, k, v))
        y = keras.ops.dot_product_attention(q, k, v)
        return self.out(keras.ops.reshape(y, (-1, LENGTH, WIDTH)))


def network(width=32, dtype=None):
    """A vocabulary that does not divide, a fused kernel, state, dropout."""
    inputs = keras.Input((LENGTH,), dtype="int32")
    x = layers.Embedding(WORDS, WIDTH, name="words", dtype=dtype)(inputs)
    x = x + Fused(name="attention", dtype=dtype)(x)
    x = layers.BatchNormalization(dtype=dtype)(x)
    y = layers.Dense(width, activation="gelu", name="up", dtype=dtype)(x)
    y = layers.Dropout(0.2, dtype=dtype)(y)
    x = x + layers.Dense(WIDTH, name="down", dtype=dtype)(y)
    outputs = layers.Dense(WORDS, name="logits", dtype=dtype)(x)
    model = keras.Model(inputs, outputs, name="network")
    model.compile(
        harness.SummedAdam(0.01),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model


def data():
    return np.random.default_rng(0).integers(0, WORDS, (2, 8, LENGTH), "int32")


def under(shape, **arguments):
    """Context of a distribution, or of none."""
    if shape is None:
        return contextlib.nullcontext()
    return distribution.TensorParallel(
        harness.mesh(shape), strict=False, **arguments
    ).scope()


def values_of(model):
    """The values of weights and slots, from all devices."""
    return [
        np.array(keras.ops.convert_to_numpy(variable))
        for variable in (*model.weights, *model.optimizer.variables)
    ]


def train(model, steps=2):
    return [float(model.train_on_batch(*data())[0]) for _ in range(steps)]


def saved(shape, folder, **arguments):
    """Trains, saves, trains; returns the values and the losses."""
    keras.utils.set_random_seed(3)
    with under(shape, **arguments):
        model = network()
        train(model)
        distribution.save_checkpoint(folder, model)
        values = values_of(model)
        model.reset_metrics()
        return values, train(model)


def loaded(shape, folder, **arguments):
    """Loads into a model of other values, trains; returns the same two."""
    keras.utils.set_random_seed(4)
    with under(shape, **arguments):
        model = network()
        distribution.load_checkpoint(folder, model)
        values = values_of(model)
        model.reset_metrics()
        return values, train(model)


SHAPES = list(
    dict.fromkeys(
        [*map(harness.fitted, [(1, 4), (2, 2), (4, 1), (1, 2)]), None]
    )
)


def name_of(shape):
    return "plain" if shape is None else f"{shape[0]}x{shape[1]}"


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "saved"


@pytest.mark.parametrize(
    "shape",
    [SHAPES[0], *(pytest.param(s, marks=pytest.mark.slow) for s in SHAPES[1:])],
    ids=name_of,
)
@pytest.mark.parametrize("other", SHAPES, ids=name_of)
def test_a_checkpoint_loads_on_any_mesh(shape, other, folder):
    values, losses = saved(shape, folder)
    options = [{}]
    if other and other[0] > 1:
        options.append({"fully_shard": True})
    for arguments in options:
        found, later = loaded(other, folder, **arguments)
        for value, expected in zip(found, values, strict=True):
            np.testing.assert_array_equal(value, expected)
        np.testing.assert_allclose(later, losses, rtol=1e-5)


def test_each_part_is_written_once(folder):
    saved(SHAPES[0], folder)
    index = json.loads((folder / INDEX).read_text())
    held = 0
    for name in set(index["weight_map"].values()):
        with safetensors.safe_open(folder / name, "numpy") as file:
            for key in file.keys():
                held += file.get_tensor(key).nbytes
    assert held == index["metadata"]["total_size"]
    tensors = index["metadata"]["keras_tp"]["tensors"]
    parts = tensors["layers/dense/vars/0"]["parts"]
    assert len(parts) == SHAPES[0][1]
    assert sorted(os.listdir(folder)) == sorted(
        [INDEX, *set(index["weight_map"].values())]
    )


def test_a_model_that_does_not_fit_is_unchanged(folder):
    saved(SHAPES[0], folder)
    with under(SHAPES[0]):
        for other, text in [
            (network(width=64), "layers/dense/vars/0.*shape"),
            (keras.Sequential([keras.Input((3,)), layers.Dense(4)]), "lacks"),
        ]:
            before = [np.array(v) for v in other.weights]
            with pytest.raises(ValueError, match=text):
                distribution.load_checkpoint(folder, other)
            for value, variable in zip(before, other.weights):
                np.testing.assert_array_equal(value, np.array(variable))


def test_a_model_that_only_predicts_is_loaded(folder):
    x, _ = data()
    with under(SHAPES[0]):
        model = network()
        train(model)
        distribution.save_checkpoint(folder, model)
        expected = model.predict(x, verbose=0)
        whole = network()
        other = keras.Model(whole.inputs, whole.outputs)
        distribution.load_checkpoint(folder, other)
        assert not hasattr(other, "optimizer")
        np.testing.assert_array_equal(other.predict(x, verbose=0), expected)


class Subclassed(keras.Model):
    """A model that names its layers by attributes, a list and a dict."""

    def __init__(self):
        super().__init__()
        self.hidden = [layers.Dense(32, activation="relu"), layers.Dense(16)]
        self.heads = {"head": layers.Dense(4)}
        self.scale = self.add_weight(
            shape=(4,), initializer="ones", name="scale"
        )

    def call(self, x):
        for layer in self.hidden:
            x = layer(x)
        return self.heads["head"](x) * self.scale


def without_input():
    return keras.Sequential(
        [layers.Dense(32, activation="relu"), layers.Dense(4)]
    )


@pytest.mark.parametrize("make", [Subclassed, without_input])
def test_models_that_are_built_by_their_first_use(make, folder):
    x = np.random.default_rng(0).standard_normal((8, 6)).astype("float32")
    with under(SHAPES[0]):
        model = make()
        model.compile("adam", "mse")
        with pytest.raises(ValueError, match="not built"):
            distribution.save_checkpoint(folder, model)
        model.fit(x, x[:, :4], verbose=0)
    # After the scope.
    distribution.save_checkpoint(folder, model)
    with under(SHAPES[0]):
        other = make()
        other.compile("adam", "mse")
        other(x)
        distribution.load_checkpoint(folder, other)
    for a, b in zip(values_of(model), values_of(other), strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_damaged_value_is_named_before_anything_changes(folder):
    saved(SHAPES[0], folder)
    with under(SHAPES[0]):
        model = network()
        before = [np.array(v) for v in model.weights]
        if lib.process_id() == 0:
            path = max(folder.glob("*00001-of*"))
            data = bytearray(path.read_bytes())
            data[8 + int.from_bytes(data[:8], "little")] ^= 64
            path.write_bytes(data)
        lib.meet("A test")
        with pytest.raises((digests.UnreadableFileError, OSError)) as error:
            distribution.load_checkpoint(folder, model)
        assert "00001-of" in str(error.value)
        for value, variable in zip(before, model.weights):
            np.testing.assert_array_equal(value, np.array(variable))


def test_a_callback_saves_between_two_batches(folder):
    def fitted(rows, callbacks=()):
        keras.utils.set_random_seed(3)
        with under(SHAPES[0]):
            model = network()
            x, y = data()
            model.fit(
                x[:rows],
                y[:rows],
                batch_size=4,
                shuffle=False,
                callbacks=[make(model) for make in callbacks],
                verbose=0,
            )
        return values_of(model)

    def saving(model):
        def save(batch, logs):
            if batch == 0:
                distribution.save_checkpoint(folder, model)

        return keras.callbacks.LambdaCallback(on_train_batch_end=save)

    values, later = fitted(4), fitted(8, [saving])
    found, _ = loaded(SHAPES[0], folder)
    assert not np.array_equal(later[0], found[0])
    for value, expected in zip(found, values, strict=True):
        np.testing.assert_allclose(value, expected, rtol=1e-6, atol=1e-7)


def test_training_goes_on_while_a_thread_writes(folder):
    keras.utils.set_random_seed(3)
    with under(SHAPES[0]):
        model = network()
        train(model)
        values = values_of(model)
        distribution.save_checkpoint(folder, model, wait=False)
        train(model)
    # Waits for the thread.
    found, _ = loaded(SHAPES[0], folder)
    for value, expected in zip(found, values, strict=True):
        np.testing.assert_array_equal(value, expected)


@pytest.mark.parametrize("wait", [True, False])
def test_a_file_in_place_of_the_folder(wait, folder):
    with under(SHAPES[0]):
        model = network()
        folder.parent.mkdir(exist_ok=True)
        if lib.process_id() == 0:
            folder.write_text("a file")
        lib.meet("A test")
        with pytest.raises(OSError, match="there is a file of this name"):
            distribution.save_checkpoint(folder, model, wait=wait)
        lib.meet("A test")
        if lib.process_id() == 0:
            folder.unlink()
        lib.meet("A test")
        distribution.save_checkpoint(folder, model, wait=wait)
        distribution.load_checkpoint(folder, model)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_plain_keras_loads_the_consolidated_file(dtype, folder, tmp_path):
    keras.utils.set_random_seed(3)
    with under(SHAPES[0]):
        model = network(dtype=dtype)
        train(model)
        distribution.save_checkpoint(folder, model)
        values = values_of(model)
    path = harness.own_folder(tmp_path) / "model.weights.h5"
    distribution.consolidate(folder, path)
    with pytest.raises(ValueError, match="weights.h5"):
        distribution.consolidate(folder, tmp_path / "model.keras")
    keras_tp.uninstall()
    try:
        plain = network(dtype=dtype)
        plain.optimizer.build(plain.trainable_variables)
        plain.load_weights(path)
        for value, expected in zip(values_of(plain), values, strict=True):
            np.testing.assert_array_equal(value, expected)
    finally:
        keras_tp.install()


def with_own_loading(units=4):
    """A layer that saves and loads by itself, and adapters of LoRA."""
    normalize = layers.Normalization(name="normalize")
    model = keras.Sequential(
        [
            keras.Input((6,)),
            normalize,
            layers.Dense(8, name="up"),
            layers.Dense(units, name="down"),
        ]
    )
    model.get_layer("up").enable_lora(2)
    model.compile("sgd", "mse")
    return model, normalize


def test_layers_that_load_by_themselves_and_adapters(folder):
    x = np.random.default_rng(0).normal(3, 2, (16, 6)).astype("float32")
    with under(SHAPES[0]):
        model, normalize = with_own_loading()
        normalize.adapt(x)
        model.fit(x, x[:, :4], verbose=0)
        distribution.save_checkpoint(folder, model)
        other, _ = with_own_loading()
        distribution.load_checkpoint(folder, other)
        np.testing.assert_array_equal(
            other.predict(x, verbose=0), model.predict(x, verbose=0)
        )
        a, b = (m.get_layer("up").lora_kernel_a for m in (model, other))
        np.testing.assert_array_equal(np.array(a), np.array(b))


def test_other_float_dtypes_are_converted_with_a_warning(folder):
    saved(SHAPES[0], folder)
    with under(SHAPES[0]):
        model = network(dtype="bfloat16")
        with pytest.warns(UserWarning, match="float32 to bfloat16"):
            distribution.load_checkpoint(folder, model)
        distribution.save_checkpoint(folder, model)
        other = network(dtype="bfloat16")
        distribution.load_checkpoint(folder, other)
        for a, b in zip(values_of(model), values_of(other), strict=True):
            np.testing.assert_array_equal(a, b)
