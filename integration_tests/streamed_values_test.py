"""One process writes a file; the others send it their parts of variables."""

import h5py
import keras
import numpy as np
import pytest
from keras import layers

from integration_tests import blocks_test
from integration_tests import harness
from keras_tp import distribution
from keras_tp.backend import distribution_lib as lib
from keras_tp.backend.saving import one_writer
from keras_tp.backend.saving import streamed_values

pytestmark = pytest.mark.skipif(
    lib.num_processes() == 1, reason="one process holds all values"
)
WORDS = 13


def build(dtype="float32"):
    """A table of rows that do not divide, blocks, and a kernel of two dims."""
    keras.utils.set_random_seed(3)
    inputs = keras.Input((blocks_test.LENGTH,), dtype="int32")
    x = layers.Embedding(WORDS, blocks_test.WIDTH, name="table")(inputs)
    x = blocks_test.Block("split", name="block")(x)
    x = layers.Conv1D(8, 3, name="conv")(x)
    x = layers.Dense(4, name="head")(layers.Flatten()(x))
    return keras.Model(inputs, x)


@pytest.fixture(params=["float32", "bfloat16"])
def model(request):
    """A trained model, split by a plan, with the slots of its optimizer."""
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(request.param)
    try:
        mesh = harness.mesh(harness.fitted((1, 2)))
        plan = distribution.plan_sharding(build, mesh)
        with plan.distribution().scope():
            model = build()
            model.compile("adam", "mse")
            x = np.arange(4 * blocks_test.LENGTH).reshape(4, -1) % WORDS
            model.train_on_batch(x, np.ones((4, 4), "float32"))
            yield model
    finally:
        keras.config.set_dtype_policy(before)


@pytest.fixture
def gathered(monkeypatch):
    """Shapes of the variables that are gathered, as a list."""
    original, found = one_writer.backend.convert_to_numpy, []

    def noted(value):
        if streamed_values._is_spread(value):
            found.append(tuple(value.shape))
        return original(value)

    class Backend:
        convert_to_numpy = staticmethod(noted)

    monkeypatch.setattr(one_writer, "backend", Backend)
    return found


def values_of(variables):
    return [np.array(keras.ops.convert_to_numpy(v)) for v in variables]


def assert_equal(found, expected):
    for array, other in zip(found, expected, strict=True):
        assert array.tobytes() == other.tobytes()


def contents(path):
    """Returns the values and attributes of a file, and its seal."""
    found = {}

    def note(name, item):
        found[name] = dict(item.attrs)
        if isinstance(item, h5py.Dataset):
            found[name]["value"] = item.dtype.str, item[()].tobytes()

    with h5py.File(path) as file:
        file.visititems(note)
        return found, file.attrs["keras_tp_seal"]


@pytest.mark.parametrize("piece_bytes", [64, 4096])
def test_files_are_those_of_whole_values(
    piece_bytes, model, gathered, monkeypatch, tmp_path
):
    whole, streamed = tmp_path / "a.weights.h5", tmp_path / "b.weights.h5"
    model.save_weights(whole)
    assert gathered
    gathered.clear()
    monkeypatch.setattr(streamed_values, "_LARGE_BYTES", 0)
    monkeypatch.setattr(streamed_values, "_LEAST_BYTES", piece_bytes)
    monkeypatch.setattr(streamed_values, "_PIECES_BYTES", 0)
    model.save_weights(streamed)
    assert not gathered
    assert contents(streamed) == contents(whole)
    model.load_weights(streamed)


def test_files_of_parts(model, gathered, monkeypatch, tmp_path):
    monkeypatch.setattr(streamed_values, "_LARGE_BYTES", 0)
    path = tmp_path / "model.weights.json"
    expected = values_of(model.weights)
    # Of 5 KiB at most.
    model.save_weights(path, max_shard_size=5e-6)
    assert not gathered
    lib.meet("The files")
    assert len(list(tmp_path.glob("*.weights.h5"))) > 1
    for variable in model.weights:
        variable.assign(keras.ops.zeros(variable.shape))
    model.load_weights(path)
    assert_equal(values_of(model.weights), expected)


def test_whole_models(model, gathered, monkeypatch, tmp_path):
    monkeypatch.setattr(streamed_values, "_LARGE_BYTES", 0)
    path = tmp_path / "model.keras"
    expected = values_of(model.variables)
    model.save(path)
    assert not gathered
    objects = {"Block": blocks_test.Block}
    loaded = keras.saving.load_model(path, custom_objects=objects)
    assert_equal(values_of(loaded.variables), expected)
