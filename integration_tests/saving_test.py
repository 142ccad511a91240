"""Files know nothing of meshes: written under one, read under another."""

import contextlib
import errno
import os
import pathlib
import re
import shutil

import h5py
import keras
import numpy as np
import pytest

import keras_tp
from integration_tests import harness
from integration_tests import zoo
from keras_tp import backend
from keras_tp import distribution
from keras_tp.backend.saving import digests

FEATURES = 12
OUTPUTS = 5
BATCH = 4

LAYOUTS = {
    "up/kernel": (None, "model"),
    "up/bias": ("model",),
    "down/kernel": ("model", None),
}
SLOTS = 2

# A place is a mesh or, `None`, one device. Files go from the first of two to
# the second, and back.
TRIPS = [
    ((1, 4), (2, 2)),
    ((1, 4), (1, 2)),
    ((1, 4), None),
    ((2, 2), (1, 4)),
    ((1, 2), (1, 4)),
    (None, (1, 4)),
]
# Each once, where they are fitted to the run.
TRIPS = list(
    dict.fromkeys(
        tuple(place and harness.fitted(place) for place in trip)
        for trip in TRIPS
    )
)


def name_of(place):
    return "one" if place is None else "x".join(map(str, place))


def trip_name(trip):
    return "_to_".join(name_of(place) for place in trip)


def at(place):
    """Scope of a place to build or load a model in."""
    if place is None:
        return contextlib.nullcontext()
    return harness.model_parallel(LAYOUTS, harness.fitted(place)).scope()


def folder_of(place, tmp_path):
    return harness.own_folder(tmp_path) if place is None else tmp_path


def samples():
    rng = np.random.default_rng(5)
    # The last batch is of 2 samples.
    x = rng.standard_normal((10, FEATURES), "float32")
    return x, rng.standard_normal((10, OUTPUTS), "float32")


def network(units=16, outputs=OUTPUTS, last=True):
    # Without dropout: Keras does not save how far its masks have come.
    keras.utils.set_random_seed(1)
    inputs = keras.Input((FEATURES,))
    x = zoo.dense(units, "up", activation="relu")(inputs)
    x = zoo.dense(outputs, "down")(x)
    if last:
        x = zoo.dense(outputs, "last")(x)
    model = keras.Model(inputs, x, name="network")
    model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
    return model


def fit(model, **arguments):
    x, y = samples()
    history = model.fit(
        x, y, batch_size=BATCH, shuffle=False, verbose=0, **arguments
    )
    return history.history["loss"]


def predict(model):
    return model.predict(samples()[0], batch_size=BATCH, verbose=0)


def state_of(model):
    """Returns all that a file has to keep, as arrays."""
    variables = [*model.variables, *model.optimizer.variables]
    return [keras.ops.convert_to_numpy(v) for v in variables]


def assert_same(actual, expected):
    assert len(actual) == len(expected)
    for a, b in zip(actual, expected):
        np.testing.assert_array_equal(a, b)


def assert_placed(model, place):
    """Split, or not, as its place asks for; the optimizer's slots too."""
    rows = distribution.describe(model).rows
    split = [row for row in rows if row.is_split]
    if place is None:
        assert not split
        return
    place = harness.fitted(place)
    assert {r.path for r in split if r.role == "weight"} == set(LAYOUTS)
    assert len(split) == (1 + SLOTS) * len(LAYOUTS)
    names = harness.mesh_devices(place)
    for row in split:
        assert row.device_bytes == dict.fromkeys(names, row.bytes // place[1])


@pytest.mark.parametrize("trip", TRIPS, ids=trip_name)
@pytest.mark.parametrize("suffix", [".keras", ".weights.h5"])
def test_from_one_mesh_to_another(suffix, trip, tmp_path):
    source, target = trip
    path = str(folder_of(source, tmp_path) / f"model{suffix}")
    with at(source):
        model = network()
        fit(model, epochs=2)
    assert_placed(model, source)
    # Under the model's own distribution, whatever is set by now.
    if suffix == ".keras":
        model.save(path)
    else:
        model.save_weights(path)
    saved, predicted = state_of(model), predict(model)

    with at(target):
        if suffix == ".keras":
            loaded = keras.saving.load_model(path)
        else:
            loaded = network()
            loaded.optimizer.build(loaded.trainable_variables)
            loaded.load_weights(path)
    assert_same(state_of(loaded), saved)
    assert_placed(loaded, target)
    np.testing.assert_allclose(predict(loaded), predicted, atol=1e-6)
    # Optimizer state included, or the losses would part.
    np.testing.assert_allclose(
        fit(loaded, epochs=3), fit(model, epochs=3), rtol=1e-5
    )
    assert_placed(loaded, target)

    # And back.
    path = str(folder_of(target, tmp_path) / f"back{suffix}")
    if suffix == ".keras":
        loaded.save(path)
        with at(source):
            model = keras.saving.load_model(path)
    else:
        loaded.save_weights(path)
        model.load_weights(path)
    assert_same(state_of(model), state_of(loaded))
    assert_placed(model, source)


def test_a_file_is_that_of_plain_keras(tmp_path):
    """The same entries, and readable where keras_tp is not installed."""
    h5py = pytest.importorskip("h5py")

    def entries(path):
        found = {}
        with h5py.File(path) as file:
            file.visititems(
                lambda name, item: (
                    found.update({name: item.shape})
                    if isinstance(item, h5py.Dataset)
                    else None
                )
            )
        return found

    plain = network()
    fit(plain, epochs=1)
    path = harness.own_folder(tmp_path) / "plain.weights.h5"
    plain.save_weights(path)
    with at((1, 4)):
        model = network()
    fit(model, epochs=1)
    model.save_weights(tmp_path / "sharded.weights.h5")
    expected = entries(path)
    assert expected
    assert entries(tmp_path / "sharded.weights.h5") == expected

    weights = [keras.ops.convert_to_numpy(v) for v in model.weights]

    keras_tp.uninstall()
    harness.assert_plain()
    keras.utils.clear_session()
    plain = network()
    plain.optimizer.build(plain.trainable_variables)
    plain.load_weights(tmp_path / "sharded.weights.h5")
    assert_same(
        [keras.ops.convert_to_numpy(v) for v in plain.weights],
        weights,
    )


def test_a_file_of_the_old_format(tmp_path):
    """Whole models in HDF5, which Keras still writes."""
    with at((1, 4)):
        model = network()
        fit(model, epochs=1)
    path = tmp_path / "model.h5"
    model.save(path)
    weights = [keras.ops.convert_to_numpy(v) for v in model.weights]
    predicted = predict(model)
    keras_tp.uninstall()
    keras.utils.clear_session()
    plain = keras.saving.load_model(path, compile=False)
    harness.assert_plain()
    assert_same([keras.ops.convert_to_numpy(v) for v in plain.weights], weights)
    np.testing.assert_allclose(predict(plain), predicted, atol=1e-6)


@pytest.mark.parametrize(
    "trip", [((1, 4), (2, 2)), (None, (1, 4))], ids=trip_name
)
@pytest.mark.parametrize("weights_only", [False, True])
def test_resuming_from_a_model_checkpoint(weights_only, trip, tmp_path):
    source, target = trip
    suffix = ".weights.h5" if weights_only else ".keras"
    tmp_path = folder_of(source, tmp_path)
    with at(source):
        model = network()
    checkpoint = keras.callbacks.ModelCheckpoint(
        str(tmp_path / ("epoch_{epoch}" + suffix)),
        save_weights_only=weights_only,
    )
    losses = fit(model, epochs=4, callbacks=[checkpoint])
    path = str(tmp_path / ("epoch_2" + suffix))
    with at(target):
        if weights_only:
            resumed = network()
            resumed.optimizer.build(resumed.trainable_variables)
            resumed.load_weights(path)
        else:
            resumed = keras.saving.load_model(path)
    resumed_losses = fit(resumed, epochs=4, initial_epoch=2)
    np.testing.assert_allclose(resumed_losses, losses[2:], rtol=1e-5)
    assert_placed(resumed, target)


def truncated(path, part):
    """Returns the path of a copy that ends early, this process's own."""
    copy = harness.own_folder(path.parent) / path.name
    content = path.read_bytes()
    copy.write_bytes(content[: int(len(content) * part)])
    return copy


@pytest.fixture
def trained():
    with at((1, 4)):
        model = network()
    fit(model, epochs=1)
    return model


@contextlib.contextmanager
def refused(model, path):
    """The file is named in a `ValueError`, and the model left as it was."""
    before, predicted = state_of(model), predict(model)
    with pytest.raises(ValueError, match=re.escape(str(path))):
        yield
    assert_same(state_of(model), before)
    assert_placed(model, (1, 4))
    np.testing.assert_array_equal(predict(model), predicted)


PARTS = pytest.mark.parametrize("part", [0.0, 0.3, 0.6, 0.9, 0.99])


@PARTS
@pytest.mark.parametrize("suffix", [".keras", ".weights.h5"])
def test_loading_the_weights_of_a_truncated_file(
    suffix, part, trained, tmp_path
):
    path = tmp_path / f"model{suffix}"
    trained.save(path) if suffix == ".keras" else trained.save_weights(path)
    # It is the damage that is refused.
    trained.load_weights(path)
    # Other values than those in the file.
    fit(trained, epochs=1)
    path = truncated(path, part)
    with refused(trained, path):
        trained.load_weights(path)


def test_a_file_that_is_not_one_is_an_os_error_too(trained, tmp_path):
    # `BackupAndRestore` catches it, and reads the file before the last.
    path = harness.own_folder(tmp_path) / "latest.weights.h5"
    path.write_text("0")
    before = state_of(trained)
    with pytest.raises(OSError, match=re.escape(str(path))):
        trained.load_weights(path)
    assert_same(state_of(trained), before)


def test_a_file_that_was_refused_is_closed(trained, tmp_path):
    """Or HDF5 takes what it knows of it for what is written there next."""
    path = tmp_path / "model.weights.h5"
    trained.save_weights(path)
    with harness.model_parallel(LAYOUTS, harness.fitted((1, 4))).scope():
        other = network(units=32)
    errors = []
    path = pathlib.Path(
        shutil.copy(path, harness.own_folder(tmp_path) / "more.weights.h5")
    )
    with h5py.File(path, "a") as file:
        # Found when it was opened.
        file["layers/functional/more"] = np.ones(3)
    for model in (other, trained):
        with pytest.raises(ValueError) as error:
            model.load_weights(path)
        # The frames of an error keep what they hold.
        errors.append(error)
    opened = h5py.h5f.get_obj_ids(types=h5py.h5f.OBJ_FILE)
    assert str(tmp_path) not in str([h5py.h5f.get_name(f) for f in opened])


@PARTS
def test_loading_a_truncated_model(part, trained, tmp_path):
    path = tmp_path / "model.keras"
    trained.save(path)
    with at((1, 4)):
        assert keras.saving.load_model(path).optimizer.built
    path = truncated(path, part)
    with refused(trained, path), at((1, 4)):
        keras.saving.load_model(path)
    assert keras.distribution.distribution() is None


@pytest.mark.parametrize(
    "other",
    [
        {"units": 32},
        # Later layers differ: what stands before them would have been read.
        {"outputs": OUTPUTS + 1},
        {"last": False},
    ],
    ids=["other_first_layer", "other_second_layer", "no_last_layer"],
)
@pytest.mark.parametrize("place", [None, (1, 4)], ids=name_of)
def test_the_weights_of_another_model(place, other, trained, tmp_path):
    path = folder_of(place, tmp_path) / "other.weights.h5"
    with at(place):
        model = network(**other)
    model.save_weights(path)
    # The other model itself reads it.
    model.load_weights(path)
    with refused(trained, path):
        trained.load_weights(path)


def test_a_file_that_is_not_there(trained, tmp_path):
    before = state_of(trained)
    for name in ("model.keras", "model.weights.h5"):
        path = tmp_path / name
        with pytest.raises((FileNotFoundError, ValueError), match=name):
            trained.load_weights(path)
    assert_same(state_of(trained), before)


@pytest.mark.parametrize("kind", ["legacy", "folder"])
def test_formats_without_a_store_have_digests(kind, trained, tmp_path):
    # The older format does not load the name of a loss.
    loss = keras.losses.MeanSquaredError()
    trained.compile(keras.optimizers.Adam(0.01), loss)
    fit(trained, epochs=1)
    if kind == "legacy":
        path = tmp_path / "model.h5"
        trained.save(path)
    else:
        path = tmp_path / "model"
        keras.saving.save_model(trained, path, zipped=False)

    def loaded():
        model = keras.saving.load_model(copy)
        # The optimizer of a functional model is not restored from the older
        # format.
        return state_of(model)[: len(saved)]

    saved = state_of(trained)
    if kind == "legacy":
        saved = saved[: len(trained.weights)]
    copy = harness.own_folder(tmp_path) / path.name
    (shutil.copyfile if kind == "legacy" else shutil.copytree)(path, copy)
    with at((1, 4)):
        assert_same(loaded(), saved)
    damaged = copy if kind == "legacy" else copy / "config.json"
    content = damaged.read_bytes()
    for place in (9, len(content) // 2, len(content) - 3):
        flipped = bytearray(content)
        flipped[place] ^= 1
        damaged.write_bytes(flipped)
        with refused(trained, copy), at((1, 4)):
            loaded()
        for by_name in (False, True) if kind == "legacy" and place > 99 else ():
            with refused(trained, copy):
                trained.load_weights(copy, by_name=by_name)
    damaged.write_bytes(content)
    if kind == "legacy":
        trained.load_weights(copy)
        trained.load_weights(copy, by_name=True)
    # Plain Keras reads the same files.
    keras_tp.uninstall()
    harness.assert_plain()
    keras.utils.clear_session()
    assert_same(loaded(), saved)


def test_each_value_has_a_digest(trained, tmp_path):
    """A tool may copy a file without the digest of all its bytes."""
    saved = tmp_path / "a.weights.h5"
    trained.save_weights(saved)
    path = harness.own_folder(tmp_path) / "copy.weights.h5"
    with h5py.File(saved) as file, h5py.File(path, "w") as copy:
        copy.attrs.update(file.attrs)
        for name in file:
            file.copy(name, copy)
    trained.load_weights(path)
    fit(trained, epochs=1)
    with h5py.File(path, "r+") as copy:
        copy["layers/dense/vars/1"][0] += 1
    with refused(trained, path):
        trained.load_weights(path)


def test_values_are_not_read_once_more_for_digests(tmp_path, monkeypatch):
    def read(dataset):
        raise AssertionError(f"{dataset.name} is read again")

    with at((1, 2)):
        model = network()
        model.save_weights(tmp_path / "a.weights.h5")
        monkeypatch.setattr(digests, "_blocks", read)
        model.load_weights(tmp_path / "a.weights.h5")


def test_an_error_while_saving_leaves_the_older_file(tmp_path, monkeypatch):
    def fail(*args):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    path = tmp_path / "a.weights.h5"
    with at((1, 2)):
        model = network()
        model.save_weights(path)
        older = path.read_bytes()
        monkeypatch.setattr(keras.layers.Dense, "save_own_variables", fail)
        with pytest.raises(OSError, match="No space"):
            model.save_weights(path)
        # By now process 0 has removed its temporary file.
        backend.distribution_lib.meet("The end of a save that failed")
    assert path.read_bytes() == older
    assert list(tmp_path.iterdir()) == [path]


class Interrupted(keras.layers.Dense):
    """A layer whose save is interrupted, once it is told so."""

    is_told = False

    def save_own_variables(self, store):
        super().save_own_variables(store)
        if Interrupted.is_told:
            raise KeyboardInterrupt


@pytest.mark.parametrize("has_more", [False, True])
def test_an_unpacked_model_is_replaced_as_a_whole(
    has_more, tmp_path, monkeypatch
):
    path = tmp_path / "model"
    with at((1, 4)):
        model = keras.Sequential(
            [
                keras.Input((FEATURES,)),
                Interrupted(8, name="up"),
                keras.layers.Dense(OUTPUTS, name="down"),
            ]
        )
        model.compile("sgd", "mse")
        keras.saving.save_model(model, path, zipped=False)
        if has_more:
            (path / "more").mkdir(exist_ok=True)
            (path / "more" / "notes.txt").write_text("mine")
        before = state_of(model)
        model.layers[0].kernel.assign(model.layers[0].kernel + 1)
        monkeypatch.setattr(Interrupted, "is_told", True)
        with pytest.raises(KeyboardInterrupt):
            keras.saving.save_model(model, path, zipped=False)
        monkeypatch.setattr(Interrupted, "is_told", False)
        names = {Interrupted.__name__: Interrupted}
        assert_same(state_of(keras.saving.load_model(path, names)), before)
        keras.saving.save_model(model, path, zipped=False)
        loaded = keras.saving.load_model(path, names)
    assert_same(state_of(loaded), state_of(model))
    assert os.listdir(tmp_path) == ["model"]
    if has_more:
        assert (path / "more" / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("name", ["SGD", "AdamW"])
def test_an_optimizer_of_a_file_that_torch_wrote(name):
    module = f"keras.src.backend.torch.optimizers.torch_{name.lower()}"
    with at((1, 2)):
        found = keras.saving.deserialize_keras_object(
            {
                "module": module,
                "class_name": name,
                "config": {},
                "registered_name": name,
            }
        )
    assert type(found) is type(getattr(keras.optimizers, name)())
