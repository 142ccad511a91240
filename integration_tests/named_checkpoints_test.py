"""Paths that end in `.safetensors`, wherever Keras takes a path of a model."""

import json
import os
import pathlib

import keras
import numpy as np
import pytest
from keras import layers

import keras_tp
from integration_tests import harness
from integration_tests.checkpoints_test import SHAPES
from integration_tests.checkpoints_test import under
from integration_tests.checkpoints_test import values_of
from keras_tp import distribution
from keras_tp.backend import distribution_lib as lib
from keras_tp.backend.saving import checkpoint_folder
from keras_tp.distribution import checkpoint_state

WHERE = [SHAPES[0], None]
EPOCHS, BATCHES = 3, 4


def network(width=16):
    inputs = keras.Input((6,))
    x = layers.Dense(width, "relu", name="up")(inputs)
    x = layers.Dropout(0.2)(x)
    model = keras.Model(inputs, layers.Dense(4, name="down")(x))
    model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
    return model


def data():
    rng = np.random.default_rng(5)
    return (
        rng.standard_normal((4 * BATCHES, 6)).astype("float32"),
        rng.standard_normal((4 * BATCHES, 4)).astype("float32"),
    )


def trained(seed=3):
    keras.utils.set_random_seed(seed)
    model = network()
    model.fit(*data(), verbose=0)
    return model


def axes_of(model):
    layout = model.get_layer("up").kernel._layout
    return layout and layout.axes


def assert_equal(model, other):
    for a, b in zip(values_of(model), values_of(other), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.fixture
def path(tmp_path):
    # Without a distribution, nothing else installs the hooks.
    keras_tp.install()
    return tmp_path / "model.safetensors"


@pytest.mark.parametrize("shape", WHERE, ids=["split", "plain"])
def test_weights(shape, path):
    with under(shape):
        model = trained()
        model.save_weights(path)
        assert checkpoint_folder.exists(path)
        other = trained(seed=4)
        # As a shell completes the name of a folder.
        other.load_weights(f"{path}{os.sep}")
        assert_equal(model, other)
    # After the scope.
    keras.saving.save_weights(model, str(path))
    other = trained(seed=4) if shape is None else other
    keras.saving.load_weights(other, path)
    assert_equal(model, other)


@pytest.mark.parametrize("shape", WHERE, ids=["split", "plain"])
def test_models(shape, path):
    x, y = data()
    with under(shape):
        model = trained()
        model.save(path)
        loaded = keras.saving.load_model(path)
        assert_equal(model, loaded)
        assert axes_of(loaded) == axes_of(model)
        model.reset_metrics()
        expected = model.train_on_batch(x, y)
        # Loading has set the random state of the save.
        loaded = keras.models.load_model(path)
        loaded.reset_metrics()
        assert loaded.train_on_batch(x, y) == expected
        predicts = keras.saving.load_model(path, compile=False)
        assert not hasattr(predicts, "optimizer")
        keras.saving.save_model(predicts, str(path))
        loaded = keras.saving.load_model(str(path))
        np.testing.assert_array_equal(
            loaded.predict(x, verbose=0), predicts.predict(x, verbose=0)
        )


@pytest.mark.parametrize("name", ["adam", "sgd"])
def test_a_model_that_was_saved_before_its_first_step(name, path):
    x, y = data()
    with under(SHAPES[0]):
        model = keras.Sequential([keras.Input((6,)), layers.Dense(4)])
        model.compile(name, "mse")
        model.optimizer.learning_rate = 0.03
        model.save(path)
        expected = [model.train_on_batch(x, y) for _ in range(2)]
        # Loading has set the random state of the save.
        loaded = keras.saving.load_model(path)
        found = [loaded.train_on_batch(x, y) for _ in range(2)]
        np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_a_model_is_made_under_the_current_distribution(path):
    x, _ = data()
    with under(SHAPES[0]):
        model = trained()
        model.save(path)
        expected = model.predict(x, verbose=0)
    for shape in SHAPES:
        with under(shape):
            loaded = keras.saving.load_model(path)
        is_split = shape is not None and shape[1] > 1
        assert is_split == ("model" in (axes_of(loaded) or ()))
        found = loaded.predict(x, verbose=0)
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_a_model_that_was_saved_as_h5_before(path, tmp_path):
    """Keras then loads another optimizer from `.keras`."""
    with under(SHAPES[0]):
        model = trained()
        model.save(tmp_path / "model.h5")
        model.save(path)
        assert_equal(keras.saving.load_model(path), model)


class Noting(layers.Layer):
    """A layer with files of its own."""

    def __init__(self, words=(), **kwargs):
        super().__init__(**kwargs)
        self.words = list(words)

    def call(self, x):
        return x

    def save_assets(self, folder):
        below = pathlib.Path(folder, "below")
        below.mkdir()
        (below / "words.txt").write_text("\n".join(self.words))
        pathlib.Path(folder, "empty").touch()

    def load_assets(self, folder):
        assert not pathlib.Path(folder, "empty").read_bytes()
        text = pathlib.Path(folder, "below", "words.txt").read_text()
        self.words = text.splitlines()


def with_assets():
    return keras.Sequential(
        [
            keras.Input((6,)),
            Noting(["a", "é"]),
            layers.Dense(4),
            Noting(["third"]),
        ]
    )


def test_assets(path, tmp_path):
    with under(SHAPES[0]):
        model = with_assets()
        model.save(path)
        names = {"Noting": Noting}
        loaded = keras.saving.load_model(path, names)
        assert loaded.layers[0].words == ["a", "é"]
        assert loaded.layers[2].words == ["third"]
        # The weights alone, too.
        other = with_assets()
        other.load_weights(path)
        folder = checkpoint_folder.CheckpointFolder(path)
        assert sum(n.startswith("@assets/") for n in folder.tensors) == 4
    file = harness.own_folder(tmp_path) / "model.weights.h5"
    distribution.consolidate(path, file)
    with_assets().load_weights(file)


def with_strings():
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((6,)), layers.Dense(4)])
    model.lookup = layers.StringLookup()
    return model


def test_a_vocabulary_that_was_counted(path):
    with under(SHAPES[0]):
        model = with_strings()
        model.lookup.adapt(["a", "b", "b"])
        vocabulary = model.lookup.get_vocabulary()
        model.save(path)
    folder = checkpoint_folder.CheckpointFolder(path)
    (name,) = [n for n in folder.tensors if n.startswith("@assets/")]
    assert name.endswith("vocabulary.txt")
    assert vocabulary == ["[UNK]", "b", "a"]


@pytest.mark.parametrize("name", ["../words", "/words", "a/../../words"])
def test_an_asset_outside_of_its_folder(name, path):
    with under(SHAPES[0]):
        model = with_assets()
        model.save(path)
        lib.meet("A test")
        if lib.process_id() == 0:
            change_index(path, "below/words.txt", name)
        lib.meet("A test")
        with pytest.raises(OSError, match="own folder"):
            keras.saving.load_model(path, {"Noting": Noting})


def change_index(path, old, new):
    """Renames tensors as someone would who also counts the digest."""
    import safetensors.numpy

    from keras_tp.backend.saving import digests

    index = path / checkpoint_folder.INDEX
    config = json.loads(index.read_text().replace(old, new))
    added = config["metadata"]["keras_tp"]
    added.pop("sha256")
    added["sha256"] = digests.digest_of_json(added)
    index.write_text(json.dumps(config))
    for file in path.glob("*.safetensors"):
        held = safetensors.numpy.load_file(file)
        renamed = {key.replace(old, new): v for key, v in held.items()}
        safetensors.numpy.save_file(renamed, file)


class Nameless(keras.Model):
    """Has no config: Keras cannot serialize a layer that it was given."""

    def __init__(self, function):
        super().__init__()
        self.function = function
        self.dense = layers.Dense(4)

    def get_config(self):
        raise NotImplementedError("no config")

    def call(self, x):
        return self.function(self.dense(x))


def test_a_model_without_a_config(path):
    x, _ = data()
    with under(SHAPES[0]):
        model = Nameless(lambda x: 2 * x)
        model(x)
        model.save(path)
        with pytest.raises(ValueError, match="load_weights.*no config"):
            keras.saving.load_model(path)
        other = Nameless(lambda x: 2 * x)
        other(x)
        other.load_weights(path)
        np.testing.assert_array_equal(
            model.predict(x, verbose=0), other.predict(x, verbose=0)
        )


def test_safe_mode_refuses_a_lambda(path):
    with under(SHAPES[0]):
        model = keras.Sequential(
            [keras.Input((6,)), layers.Dense(4), layers.Lambda(lambda x: 2 * x)]
        )
        model.save(path)
        with pytest.raises(ValueError, match="safe_mode"):
            keras.saving.load_model(path)
        loaded = keras.saving.load_model(path, safe_mode=False)
        for a, b in zip(model.weights, loaded.weights, strict=True):
            np.testing.assert_array_equal(np.array(a), np.array(b))


def test_arguments_of_other_formats(path):
    with under(SHAPES[0]):
        model = trained()
        for call, name in [
            (lambda: model.save(path, zipped=True), "zipped"),
            (lambda: model.save(path, save_format="tf"), "save_format"),
            (lambda: model.save_weights(path, max_shard_size=1), "max_shard"),
            (lambda: model.load_weights(path, skip_mismatch=True), "skip_mis"),
            (lambda: model.load_weights(path, by_name=True), "by_name"),
        ]:
            with pytest.raises(ValueError, match=name):
                call()
        assert not path.exists()
        with pytest.raises((FileNotFoundError, OSError), match="no checkpoint"):
            model.load_weights(path)
        with pytest.raises((FileNotFoundError, OSError), match="no checkpoint"):
            keras.saving.load_model(path)


@pytest.mark.parametrize("answer", [True, False])
def test_overwrite(answer, path, monkeypatch):
    asked = []

    def ask(path):
        asked.append(path)
        return answer

    monkeypatch.setattr(
        "keras.src.utils.io_utils.ask_to_proceed_with_overwrite", ask
    )
    with under(SHAPES[0]):
        model = trained()
        model.save(path, overwrite=False)
        assert not asked
        later = trained(seed=4)
        later.save(path, overwrite=False)
        assert asked == [str(path)] * (lib.process_id() == 0)
        expected = later if answer else model
        assert_equal(keras.saving.load_model(path), expected)
        model.save_weights(path, overwrite=False)
        assert len(asked) == 2 * (lib.process_id() == 0)
        later.save(path)
        assert_equal(keras.saving.load_model(path), later)


def test_other_paths_are_those_of_keras(path, tmp_path):
    folder = harness.own_folder(tmp_path)
    model = trained()
    model.save(folder / "model.keras")
    keras.saving.load_model(folder / "model.keras")
    with pytest.raises(ValueError, match="extension"):
        model.save(folder / "model")
    with pytest.raises(ValueError, match="weights.h5"):
        model.save_weights(folder / "model")
    with pytest.raises(ValueError, match="weights.h5"):
        keras.callbacks.ModelCheckpoint("model", save_weights_only=True)
    # Keras writes an unpacked model to a folder of any name.
    name = folder / "unpacked.safetensors"
    model.save(name, zipped=False)
    assert (name / "config.json").exists()
    assert_equal(keras.saving.load_model(name), model)
    keras_tp.uninstall()
    with pytest.raises(ValueError, match="extension"):
        model.save(path)
    with pytest.raises(ValueError):
        keras.callbacks.ModelCheckpoint(path)


def test_a_file_of_this_name(path):
    with under(SHAPES[0]):
        model = trained()
        lib.meet("A test")
        if lib.process_id() == 0:
            path.write_text("a file")
        lib.meet("A test")
        for call in (
            lambda: model.save(path),
            lambda: model.load_weights(path),
            lambda: keras.saving.load_model(path),
        ):
            with pytest.raises(OSError, match="is a folder"):
                call()
        assert path.read_text() == "a file"


def fit(model, *callbacks):
    return model.fit(
        *data(),
        batch_size=4,
        epochs=EPOCHS,
        shuffle=False,
        verbose=0,
        callbacks=list(callbacks),
    ).history


@pytest.mark.parametrize("only", [True, False], ids=["weights", "models"])
def test_model_checkpoint(only, path):
    below = path.parent / "below"
    name = below / "{epoch:02d}.safetensors"
    with under(SHAPES[0]):
        model = trained()
        held = []
        fit(
            model,
            keras.callbacks.ModelCheckpoint(name, save_weights_only=only),
            keras.callbacks.LambdaCallback(
                on_epoch_end=lambda epoch, logs: held.append(values_of(model))
            ),
        )
        for epoch, values in enumerate(held, 1):
            loaded = keras.saving.load_model(below / f"{epoch:02d}.safetensors")
            for a, b in zip(values_of(loaded), values, strict=True):
                np.testing.assert_array_equal(a, b)
        lib.meet("A test")
    assert len(list(below.iterdir())) == EPOCHS


def test_model_checkpoint_by_batches(path):
    name = path.parent / "{epoch}-{batch}.safetensors"
    with under(SHAPES[0]):
        model = trained()
        fit(model, keras.callbacks.ModelCheckpoint(name, save_freq=3))
        lib.meet("A test")
    found = {p.name for p in path.parent.glob("*-*.safetensors")}
    assert found == {f"{n}.safetensors" for n in ("1-3", "2-2", "3-1", "3-4")}


def test_model_checkpoint_of_the_best(path):
    class Made(keras.callbacks.Callback):
        """Gives numbers to look at, before the other callbacks."""

        def on_epoch_end(self, epoch, logs=None):
            logs["score"] = [1.0, 3.0, 2.0][epoch]
            self.held = getattr(self, "held", []) + [values_of(self.model)]

    with under(SHAPES[0]):
        model = trained()
        made = Made()
        best = keras.callbacks.ModelCheckpoint(
            str(path), "score", save_best_only=True, mode="max"
        )
        fit(model, made, best)
        assert best.best == 3.0
        loaded = keras.saving.load_model(path)
        for a, b in zip(values_of(loaded), made.held[1], strict=True):
            np.testing.assert_array_equal(a, b)


def test_names_of_assets_are_not_attributes():
    assert not checkpoint_state.ASSETS.isidentifier()
