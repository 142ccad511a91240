"""Weights files of which each process reads the parts that it holds."""

import contextlib
import shutil
import subprocess
import sys
import zipfile

import h5py
import keras
import numpy as np
import pytest
from keras import layers

from integration_tests import harness
from integration_tests import launching
from keras_tp import distribution
from keras_tp.backend import distribution_lib as lib
from keras_tp.backend.saving import archives


def build(dtype=None):
    """Kernels that are split: by columns, by rows, unevenly, and in blocks."""
    inputs = keras.Input((8,), dtype="int32")
    x = layers.Embedding(53, 16, name="words", dtype=dtype)(inputs)
    y = layers.EinsumDense(
        "abc,cde->abde", (None, 4, 4), bias_axes="de", dtype=dtype, name="heads"
    )(x)
    y = layers.Reshape((8, 16), dtype=dtype)(y)
    x = x + layers.Dense(16, name="out", dtype=dtype)(y)
    gate, up = keras.ops.split(layers.Dense(64, name="pair")(x), 2, axis=-1)
    x = layers.Dense(16, name="down", dtype=dtype)(gate * up)
    x = layers.LayerNormalization(dtype=dtype)(x)
    model = keras.Model(inputs, layers.Dense(53, dtype=dtype, name="logits")(x))
    model.compile(keras.optimizers.Adam(0.01), "mse")
    return model


def under(shape=(1, 2)):
    mesh = harness.mesh(harness.fitted(shape))
    return distribution.TensorParallel(mesh, strict=False).scope()


def values_of(model):
    return [
        np.array(keras.ops.convert_to_numpy(v))
        for v in (*model.weights, *model.optimizer.variables)
    ]


def saved(path, dtype=None, **arguments):
    """Saves a model of one device that was trained; returns its values."""
    keras.utils.set_random_seed(5)
    model = build(dtype)
    x = np.random.default_rng(0).integers(0, 53, (4, 8))
    model.train_on_batch(x, np.ones((4, 8, 53), "float32"))
    write(model, path, **arguments)
    return values_of(model)


def write(model, path, **arguments):
    """Saves the weights of a model of one device, in one process."""
    if lib.process_id() == 0:
        if str(path).endswith(".weights.h5") or arguments:
            model.save_weights(path, **arguments)
        else:
            model.save(path)
    lib.meet("The file")


def held_bytes(model):
    """Bytes of each part on the devices of this process, as a list."""
    return [
        read().nbytes
        for variable in (*model.weights, *model.optimizer.variables)
        for _, _, read in lib.variable_parts(variable)
    ]


@pytest.mark.parametrize("shape", [(1, 2), (2, 2), (1, 4)])
@pytest.mark.parametrize("name", ["m.weights.h5", "m.weights.json", "m.keras"])
def test_each_process_reads_its_parts(name, shape, tmp_path, copied):
    arguments = {"max_shard_size": 1e-5} if name.endswith("json") else {}
    expected = saved(tmp_path / name, **arguments)
    keras.utils.set_random_seed(6)
    with under(shape):
        model = build()
        model.optimizer.build(model.trainable_variables)
        model.load_weights(tmp_path / name)
        found = values_of(model)
        for new, value in zip(found, expected, strict=True):
            np.testing.assert_array_equal(new, value)
        held = held_bytes(model)
        assert 0 < sum(copied) <= sum(held)
        # No variable that is split was read as a whole.
        assert max(copied) <= max(held) < max(value.nbytes for value in found)


def test_floats_are_converted_part_by_part(tmp_path, copied):
    expected = saved(tmp_path / "m.weights.h5", "float32")
    with under():
        model = build("bfloat16")
        with pytest.warns(UserWarning, match="have another dtype"):
            model.load_weights(tmp_path / "m.weights.h5")
        found = model.get_layer("words").embeddings
        assert found.dtype == "bfloat16" and copied
        wanted = keras.ops.cast(expected[0], "bfloat16")
        np.testing.assert_array_equal(
            np.array(keras.ops.convert_to_numpy(found), "float32"),
            np.array(keras.ops.convert_to_numpy(wanted), "float32"),
        )


@pytest.mark.parametrize("name", ["m.weights.h5", "m.weights.json"])
def test_damage_is_found_by_the_process_that_looks(name, tmp_path, copied):
    arguments = {"max_shard_size": 1} if name.endswith("json") else {}
    with under():
        model = build()
        model.save_weights(tmp_path / name, **arguments)
        before = values_of(model)
    files = sorted(tmp_path.glob("*.weights.h5"))
    for layer in ("words", "down", "logits"):
        if lib.process_id() == 0:
            damage(files, layer)
        lib.meet("The damage")
        with under(), pytest.raises(ValueError, match=name):
            model.load_weights(tmp_path / name)
        for new, value in zip(values_of(model), before, strict=True):
            np.testing.assert_array_equal(new, value)
        lib.meet("The look")
        if lib.process_id() == 0:
            damage(files, layer)
        lib.meet("The mend")
    with under():
        model.load_weights(tmp_path / name)


def damage(files, layer):
    """Flips one bit of the kernel of a layer; a second call flips it back."""
    offsets = []

    def note(name, item):
        is_kernel = isinstance(item, h5py.Dataset) and item.ndim > 1
        if is_kernel and name.startswith(f"layers/{layer}"):
            offsets.append((path, item.id.get_offset() + 9))

    names = {"words": "embedding", "down": "dense_2", "logits": "dense_3"}
    layer = names[layer]
    for path in files:
        if path.suffix == ".keras":
            with zipfile.ZipFile(path) as archive:
                part = archives.stored_part(archive)
            with part, h5py.File(part) as file:
                file.visititems(note)
            ((_, offset),) = offsets
            offsets[:] = [(path, part.start + offset)]
            continue
        with h5py.File(path) as file:
            file.visititems(note)
    ((path, offset),) = offsets
    with open(path, "rb+") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 4]))


def test_a_file_of_another_size_is_refused_by_name(tmp_path, copied):
    saved(tmp_path / "m.weights.h5")
    with under():
        model = keras.Sequential([keras.Input((4,)), layers.Dense(4)])
        with pytest.raises(ValueError, match="m.weights.h5.*is unchanged"):
            model.load_weights(tmp_path / "m.weights.h5")


def test_damage_of_one_copy_is_found(tmp_path, copied):
    """Each process may have the file on its own machine."""
    own = tmp_path / f"copy {lib.process_id()}"
    own.mkdir()
    with under():
        model = build()
        model.save_weights(tmp_path / "m.weights.h5")
        before = values_of(model)
    path = own / "m.weights.h5"
    shutil.copy(tmp_path / "m.weights.h5", path)
    with under():
        model.load_weights(path)
    if lib.process_id() == lib.num_processes() - 1:
        damage([path], "down")
    with under(), pytest.raises(ValueError, match="m.weights.h5"):
        model.load_weights(path)
    for new, value in zip(values_of(model), before, strict=True):
        np.testing.assert_array_equal(new, value)


@pytest.mark.parametrize("name", ["m.weights.h5", "m.keras"])
def test_processes_with_other_files_are_refused(name, tmp_path, copied):
    if lib.num_processes() == 1:
        pytest.skip("one process has one file")
    own = tmp_path / f"copy {lib.process_id()}"
    own.mkdir()
    keras.utils.set_random_seed(lib.process_id())
    plain = build()
    if name == "m.keras":
        plain.save(own / name)
    else:
        plain.save_weights(own / name)
    keras.utils.set_random_seed(1)
    with under(), pytest.raises(ValueError, match="Process 1 has another file"):
        build().load_weights(own / name)
    if name == "m.keras":
        with pytest.raises(ValueError, match="Process 1 has another file"):
            loaded(own / name)


class Subclassed(keras.Model):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.up = layers.Dense(64, name="up")
        self.down = layers.Dense(8, name="down")

    def call(self, x):
        return self.down(self.up(x))


def without_an_input():
    return keras.Sequential([layers.Dense(64), layers.Dense(8)])


@pytest.mark.parametrize("name", ["m.weights.h5", "m.keras"])
@pytest.mark.parametrize("make", [Subclassed, without_an_input])
def test_models_without_an_input_after_the_scope(make, name, tmp_path, copied):
    x = np.ones((4, 16), "float32")
    plain = make()
    plain(x)
    write(plain, tmp_path / name)
    with under():
        model = make()
        model.predict(x, verbose=0)
    model.load_weights(tmp_path / name)
    whole = [weight.nbytes for weight in plain.get_weights()]
    assert 0 < max(copied) < max(whole)
    for new, value in zip(
        model.get_weights(), plain.get_weights(), strict=True
    ):
        np.testing.assert_array_equal(new, value)


class Scaled(layers.Layer):
    """A layer that computes with what it loads."""

    def build(self, shape):
        self.kernel = self.add_weight(shape=(shape[-1], 16), name="kernel")

    def call(self, x):
        return x @ self.kernel

    def save_own_variables(self, store):
        store["half"] = keras.ops.convert_to_numpy(self.kernel) / 2

    def load_own_variables(self, store):
        self.kernel.assign(store["half"] * 2)


def test_a_layer_may_compute_with_a_stored_array(tmp_path, copied):
    def make():
        return keras.Sequential([keras.Input((8,)), Scaled()])

    keras.utils.set_random_seed(5)
    model = make()
    write(model, tmp_path / "m.weights.h5")
    expected = model.get_weights()
    with under():
        model = make()
        model.load_weights(tmp_path / "m.weights.h5")
        np.testing.assert_array_equal(model.get_weights()[0], expected[0])


def loaded(path):
    with under():
        model = keras.saving.load_model(path)
        return model, values_of(model)


@pytest.mark.parametrize("by_keras", [True, False])
@pytest.mark.parametrize("name", ["m.keras", "folder"])
def test_a_model_is_made_of_parts(name, by_keras, tmp_path, copied):
    path = tmp_path / name
    expected = saved_by(by_keras, path)
    model, found = loaded(path)
    for new, value in zip(found, expected, strict=True):
        np.testing.assert_array_equal(new, value)
    held = held_bytes(model)
    assert 0 < sum(copied) <= sum(held)
    assert max(copied) <= max(held) < max(value.nbytes for value in found)
    # Keras makes no file beside that of the model.
    assert [held.name for held in tmp_path.iterdir()] == [name]


def saved_by(by_keras, path):
    """Saves a trained model; returns its values. Our files have digests."""
    keras.utils.set_random_seed(5)
    with contextlib.nullcontext() if by_keras else under():
        model = build()
        x = np.random.default_rng(0).integers(0, 53, (4, 8))
        model.train_on_batch(x, np.ones((4, 8, 53), "float32"))
        if not by_keras or lib.process_id() == 0:
            model.save(path, zipped=path.suffix == ".keras")
        lib.meet("The file")
        return values_of(model)


@pytest.mark.parametrize("by_keras", [True, False])
def test_damage_in_an_archive_is_found_before_a_model_is_made(
    by_keras, tmp_path, copied
):
    path = tmp_path / "m.keras"
    saved_by(by_keras, path)
    with under():
        kept = build()
        before = values_of(kept)
    for layer in ("words", "down", "logits"):
        if lib.process_id() == 0:
            damage([path], layer)
        lib.meet("The damage")
        with pytest.raises(ValueError, match="m.keras.*CRC-32.*weights.h5"):
            loaded(path)
        with under(), pytest.raises(ValueError, match="m.keras.*unchanged"):
            kept.load_weights(path)
        lib.meet("The look")
        if lib.process_id() == 0:
            damage([path], layer)
        lib.meet("The mend")
    for new, value in zip(values_of(kept), before, strict=True):
        np.testing.assert_array_equal(new, value)
    loaded(path)


def test_one_damaged_copy_of_an_archive_is_an_error_in_all(tmp_path, copied):
    own = tmp_path / f"copy {lib.process_id()}"
    own.mkdir()
    saved_by(True, tmp_path / "m.keras")
    shutil.copy(tmp_path / "m.keras", own / "m.keras")
    loaded(own / "m.keras")
    if lib.process_id() == lib.num_processes() - 1:
        damage([own / "m.keras"], "down")
    with pytest.raises(ValueError, match="m.keras.*CRC-32"):
        loaded(own / "m.keras")


def test_a_compressed_archive_is_loaded(tmp_path, copied):
    expected = saved_by(True, tmp_path / "m.keras")
    path = tmp_path / "compressed.keras"
    if lib.process_id() == 0:
        kind = zipfile.ZIP_DEFLATED
        with (
            zipfile.ZipFile(tmp_path / "m.keras") as old,
            zipfile.ZipFile(path, "w", kind) as new,
        ):
            for name in old.namelist():
                new.writestr(name, old.read(name))
    lib.meet("The archive")
    _, found = loaded(path)
    for new, value in zip(found, expected, strict=True):
        np.testing.assert_array_equal(new, value)


SCRIPT = """
import sys
import keras
import keras_tp

devices = keras_tp.distribution.list_devices()[:2]
mesh = keras_tp.distribution.DeviceMesh(
    (1, len(devices)), ["batch", "model"], devices
)
with keras_tp.distribution.TensorParallel(mesh).scope():
    model = keras.Sequential(
        [keras.Input((8,)), keras.layers.Dense(16), keras.layers.Dense(8)]
    )
    for name in ("m.keras", "m.safetensors"):
        model.save(name)
        keras.saving.load_model(name)
assert "tensorflow" not in sys.modules
"""


def test_tensorflow_is_not_imported_to_save_a_model(tmp_path_factory):
    if keras.config.backend() == "tensorflow":
        pytest.skip("it is imported anyway")
    environment = launching.environment(devices=2)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT"):
        environment.pop(name, None)
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env=environment,
        # Not `tmp_path`: on torch all processes have the same.
        cwd=tmp_path_factory.mktemp("own"),
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("make", [Subclassed, without_an_input])
def test_new_models_without_an_input_work_after_the_scope(make, tmp_path):
    x = np.ones((4, 16), "float32")
    plain = make()
    expected = plain.predict(x, verbose=0)
    write(plain, tmp_path / "m.keras")
    with under():
        model = keras.saving.load_model(
            tmp_path / "m.keras", {"Subclassed": Subclassed}
        )
    found = model.predict(x, verbose=0)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    model.compile("sgd", "mse")
    assert np.isfinite(model.train_on_batch(x, expected))
    # A call of one's own.
    found = keras.ops.convert_to_numpy(model(x))
    expected = model.predict(x, verbose=0)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
