"""Weights in several files, of which all are replaced, or none.

With `max_shard_size` Keras writes parts and a JSON file that says which part
holds which variable. Here the parts get names that no file has, and the JSON
file is put in its place last. Until then it names the older parts, which are
removed afterwards.

Keras opens a file that ends in `_00000.weights.h5` whatever the JSON file
says. An empty one has that name.
"""

import contextlib
import hashlib
import json
import os
import pathlib
import re
import secrets

import h5py

from keras_tp.backend.saving import atomic_files
from keras_tp.backend.saving import digests
from keras_tp.backend.saving import file_seal

_ADDED = "keras_tp"
_SUFFIX = ".weights.h5"


@contextlib.contextmanager
def replaced(path):
    """Gives a path that Keras writes to; the files then replace older ones.

    Args:
        path: String, path of the JSON file, whose folder exists.

    Raises:
        OSError: if there is no space left, with the name of the file.
    """
    given = pathlib.Path(path)
    # Keras does so with other suffixes, and warns.
    path = given.with_suffix(".json")
    with (
        atomic_files.folder_beside(path) as folder,
        atomic_files.full_disk_named(path),
    ):
        yield str(folder / given.name)
        _publish(folder, path)


def check(path):
    """Compares weights in several files with their digests.

    Args:
        path: String or path of the JSON file.

    Raises:
        UnreadableFileError: if something differs, with the part.
    """
    path = pathlib.Path(path).with_suffix(".json")
    try:
        config = json.loads(path.read_bytes())
        _check_structure(config)
        added = config["metadata"].pop(_ADDED, None)
    except FileNotFoundError:
        raise
    except digests.READING_ERRORS as e:
        raise digests.unreadable(e) from e
    seals = None
    if added is not None:
        seals = added.get("parts") if isinstance(added, dict) else None
        if not seals or added.get("sha256") != _digest(config, seals):
            raise digests.UnreadableFileError(
                "The list of the parts is not the one that was saved: its "
                f"SHA-256 differs. Received: '{path}'"
            )
    for name in {_first_of(path), *_names(config)}:
        part = path.with_name(name)
        try:
            digests.check_bytes(part)
            with h5py.File(part) as file:
                seal = digests.check(file)
        except digests.READING_ERRORS as e:
            raise digests.UnreadableFileError(f"In {name!r}: {e}") from e
        if seals is not None and name in seals and seals[name] != seal:
            raise digests.UnreadableFileError(
                f"The part {name!r} is of another save. Received: '{path}'"
            )


def _check_structure(config):
    if not isinstance(config["metadata"], dict):
        raise ValueError("`metadata` has to be a dict.")
    for name in _names(config):
        if pathlib.PurePath(name).name != name:
            raise ValueError(
                "A part has to be beside the file that lists it. Received: "
                f"{name!r}"
            )


def _names(config):
    """Returns the names of the parts that a JSON file lists."""
    found = []
    for listed in config["weight_map"].values():
        found += listed if isinstance(listed, list) else [listed]
    return list(dict.fromkeys(found))


def _digest(config, seals):
    text = json.dumps([config, seals], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _base_of(path):
    # As Keras has it.
    return path.stem.replace(".weights", "")


def _first_of(path):
    return f"{_base_of(path)}_00000{_SUFFIX}"


def _publish(folder, path):
    new, base = folder / path.name, _base_of(path)
    config = json.loads(new.read_text())
    token = secrets.token_hex(4)
    fresh = {
        part.name: part.name.replace(f"{base}_", f"{base}-{token}_", 1)
        for part in sorted(folder.glob(f"*{_SUFFIX}"))
    }
    config["weight_map"] = {
        variable: [fresh[name] for name in listed]
        if isinstance(listed, list)
        else fresh[listed]
        for variable, listed in config["weight_map"].items()
    }
    seals = {}
    for name in fresh:
        with h5py.File(folder / name) as file:
            seals[fresh[name]] = file.attrs[digests.SEAL]
        atomic_files.flush(folder / name)
    config["metadata"][_ADDED] = {
        "parts": seals,
        "sha256": _digest(config, seals),
    }
    new.write_text(json.dumps(config, indent=4))
    atomic_files.flush(new)
    older = _names_in(path)
    first = path.with_name(_first_of(path))
    if not first.exists():
        _write_empty(folder, first)
    for name in fresh:
        os.replace(folder / name, path.with_name(fresh[name]))
    atomic_files.flush(path.parent)
    atomic_files.put(new, path)
    if first.name in older:
        # A part of Keras's own file.
        _write_empty(folder, first)
    _remove_older(path, older, set(fresh.values()))


def _write_empty(folder, path):
    new = folder / path.name
    # One of the new parts has this name in the folder.
    new = new.with_name(f"empty_{new.name}")
    with h5py.File(new, "w") as file:
        digests.seal(file)
    file_seal.append(new)
    atomic_files.flush(new)
    atomic_files.put(new, path)


def _names_in(path):
    """Returns the parts that an older JSON file lists; none if it is damaged.

    What it does not list stays where it is.
    """
    try:
        config = json.loads(path.read_bytes())
        _check_structure(config)
        return _names(config)
    except digests.READING_ERRORS:
        return []


def _remove_older(path, older, kept):
    base = re.escape(_base_of(path))
    own = re.compile(rf"{base}-[0-9a-f]{{8}}_\d{{5,}}{re.escape(_SUFFIX)}")
    keras = re.compile(rf"{base}_\d{{5,}}{re.escape(_SUFFIX)}")
    removed = {name for name in older if keras.fullmatch(name)}
    if atomic_files.are_others_writing(path):
        # Theirs are listed nowhere yet.
        removed |= {name for name in older if own.fullmatch(name)}
    else:
        removed |= set(filter(own.fullmatch, os.listdir(path.parent)))
    for name in removed - kept - {_first_of(path)}:
        path.with_name(name).unlink(missing_ok=True)
