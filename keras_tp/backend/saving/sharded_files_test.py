import json

import h5py
import keras
import numpy as np
import pytest

from keras_tp.backend.saving import atomic_files
from keras_tp.backend.saving import digests
from keras_tp.backend.saving import sharded_files

COUNT = 3


def write(path, value):
    """Writes parts as Keras does, of one variable each."""
    with sharded_files.replaced(path) as new:
        write_into(new, value)


def write_into(new, value):
    weight_map = {}
    for index in range(COUNT):
        name = f"a_{index:05}.weights.h5"
        weight_map[f"/layers/{index}/vars"] = name
        part = f"{new.rpartition('/')[0]}/{name}"
        with h5py.File(part, "w") as file:
            held = np.full((2, 3), value, "float32")
            file["0"] = held
            digests.note(file["0"], held)
    config = {"metadata": {"total_size": 72}, "weight_map": weight_map}
    with open(new, "w") as file:
        json.dump(config, file)


def read(path):
    sharded_files.check(path)
    config = json.loads(path.read_text())
    found = set()
    for name in config["weight_map"].values():
        with h5py.File(path.with_name(name)) as file:
            found |= set(np.unique(file["0"]).tolist())
    (value,) = found
    return value


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "a.weights.json"
    write(path, 1)
    return path


def test_all_parts_are_replaced_and_the_older_go(path):
    before = set(path.parent.iterdir())
    assert read(path) == 1
    write(path, 2)
    assert read(path) == 2
    after = set(path.parent.iterdir())
    assert len(before) == len(after) == COUNT + 2
    same = {path, path.with_name("a_00000.weights.h5")}
    assert before & after == same


def test_an_error_leaves_the_older_parts(path):
    before = {p: p.read_bytes() for p in path.parent.iterdir()}
    with pytest.raises(KeyError):
        with sharded_files.replaced(path) as new:
            write_into(new, 2)
            raise KeyError
    assert before == {p: p.read_bytes() for p in path.parent.iterdir()}


@pytest.mark.parametrize("place", range(8))
def test_a_process_that_ends_anywhere(path, place, monkeypatch):
    """Either save is there as a whole, and the next removes the rest."""
    calls = []

    def ends(function):
        def replacement(*args, **kwargs):
            calls.append(args)
            if len(calls) > place:
                raise KeyboardInterrupt
            return function(*args, **kwargs)

        return replacement

    with monkeypatch.context() as patch:
        patch.setattr(
            sharded_files.os, "replace", ends(sharded_files.os.replace)
        )
        patch.setattr(atomic_files, "put", ends(atomic_files.put))
        patch.setattr(
            sharded_files.pathlib.Path,
            "unlink",
            ends(sharded_files.pathlib.Path.unlink),
        )
        try:
            write(path, 2)
        except KeyboardInterrupt:
            assert len(calls) == place + 1
    # `files.put` itself moves a file, so the JSON file takes two calls.
    assert read(path) == (1 if place < COUNT + 2 else 2)
    write(path, 3)
    assert read(path) == 3
    assert len(list(path.parent.iterdir())) == COUNT + 2


def test_parts_that_another_process_is_about_to_list_stay(path):
    other = path.with_name("a-0123abcd_00000.weights.h5")
    other.write_text("theirs")
    folder = path.with_name(f".{path.name}.elsewhere-1.abcdef")
    folder.mkdir()
    write(path, 2)
    assert other.exists() and folder.exists()
    folder.rmdir()
    write(path, 3)
    assert not other.exists()


def test_files_of_others_stay(path):
    others = ["a_00001.weights.h5", "b_00000.weights.h5", "a.weights.h5"]
    for name in others:
        path.with_name(name).write_text(name)
    write(path, 2)
    for name in others:
        assert path.with_name(name).read_text() == name


def network():
    keras.utils.set_random_seed(1)
    model = keras.Sequential(
        [keras.Input((6,)), keras.layers.Dense(8), keras.layers.Dense(4)]
    )
    return model


def test_in_place_of_the_parts_of_keras(tmp_path):
    path = tmp_path / "a.weights.json"
    model = network()
    model.save_weights(path, max_shard_size=200 / 2**30)
    before = sorted(p.name for p in tmp_path.iterdir())
    assert before == [
        *("a.weights.json", "a_00000.weights.h5", "a_00001.weights.h5")
    ]
    sharded_files.check(path)
    write(path, 2)
    assert read(path) == 2
    assert not path.with_name("a_00001.weights.h5").exists()
    with h5py.File(path.with_name("a_00000.weights.h5")) as file:
        assert not len(file)


@pytest.mark.parametrize(
    "text",
    [
        *("", "[]", "{}", '{"metadata": {}, "weight_map": []}'),
        '{"metadata": 1, "weight_map": {}}',
        '{"metadata": {}, "weight_map": {"/vars": 3}}',
        '{"metadata": {}, "weight_map": {"/vars": "../a.weights.h5"}}',
        '{"metadata": {}, "weight_map": {"/vars": "none.weights.h5"}}',
        '{"metadata": {"keras_tp": 1}, "weight_map": {}}',
        "[" * 100_000,
    ],
    ids=range(10),
)
def test_a_list_that_is_none(path, text):
    path.write_text(text)
    with pytest.raises(digests.UnreadableFileError):
        sharded_files.check(path)


def test_a_part_of_another_save(path, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    write(other / path.name, 2)
    (mine,) = path.parent.glob("a-*_00001.weights.h5")
    (theirs,) = other.glob("a-*_00001.weights.h5")
    theirs.rename(mine)
    with pytest.raises(digests.UnreadableFileError, match="to another save"):
        sharded_files.check(path)


def test_a_list_that_was_changed(path):
    text = path.read_text()
    path.write_text(text.replace("/layers/1/", "/layers/7/"))
    with pytest.raises(digests.UnreadableFileError, match="list of the parts"):
        sharded_files.check(path)
