"""Replaces weights in several files together, or none of them.

With `max_shard_size` Keras writes parts, and a JSON file that maps variables
to parts. Here the parts get new names, and the JSON file is replaced last.
Until then the JSON file names the older parts, which are removed afterwards.

Keras always opens the file that ends in `_00000.weights.h5`, even if the JSON
file does not name it. So an empty file has that name.
"""

import contextlib
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
    """Yields a path for Keras to write to, then replaces the older files.

    Args:
        path: String. Path of the JSON file, in a folder that exists.
    """
    given = pathlib.Path(path)
    # Keras replaces other suffixes, too, with a warning.
    path = given.with_suffix(".json")
    with (
        atomic_files.folder_beside(path) as folder,
        atomic_files.full_disk_named(path),
    ):
        yield str(folder / given.name)
        _publish(folder, path)


def check(path, share=(0, 1)):
    """Compares weights in several files with their digests.

    Args:
        path: String or path of the JSON file.
        share: As in `digests.check_rest`.

    Raises:
        UnreadableFileError: if something differs, with the part's name.
    """
    path = pathlib.Path(path).with_suffix(".json")
    with digests.reading():
        config = json.loads(path.read_bytes())
        _check_structure(config)
        added = config["metadata"].pop(_ADDED, None)
    seals = None
    if added is not None:
        seals = added.get("parts") if isinstance(added, dict) else None
        if not seals or added.get("sha256") != digests.digest_of_json(
            [config, seals]
        ):
            raise digests.UnreadableFileError(
                "The list of the parts is not the one that was saved: its "
                f"SHA-256 differs. Received: '{path}'"
            )
    for name in {_first_of(path), *_names(config)}:
        part = path.with_name(name)
        try:
            digests.check_bytes(part)
            with h5py.File(part) as file:
                seal = digests.check_seal(file)
                digests.check_rest(file, (), share)
        except digests.READING_ERRORS as e:
            raise digests.UnreadableFileError(f"In {name!r}: {e}") from e
        if seals is not None and name in seals and seals[name] != seal:
            raise digests.UnreadableFileError(
                f"The part {name!r} belongs to another save. Received: '{path}'"
            )


def _check_structure(config):
    if not isinstance(config["metadata"], dict):
        raise ValueError("`metadata` has to be a dict.")
    for name in _names(config):
        if pathlib.PurePath(name).name != name:
            raise ValueError(
                "A part must be in the same folder as the file that lists it. "
                f"Received: {name!r}"
            )


def _names(config):
    """Returns the names of the parts that a JSON file lists."""
    found = []
    for listed in config["weight_map"].values():
        found += listed if isinstance(listed, list) else [listed]
    return list(dict.fromkeys(found))


def _base_of(path):
    # As in `ShardedH5IOStore`.
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
        with h5py.File(folder / name, "r+") as file:
            seals[fresh[name]] = digests.seal(file)
        file_seal.append(folder / name)
        atomic_files.flush(folder / name)
    config["metadata"][_ADDED] = {
        "parts": seals,
        "sha256": digests.digest_of_json([config, seals]),
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
        # The older file was a part written by Keras alone.
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

    Parts with Keras's names that it does not list are kept.
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
        # No JSON file lists the parts of the others yet.
        removed |= {name for name in older if own.fullmatch(name)}
    else:
        removed |= set(filter(own.fullmatch, os.listdir(path.parent)))
    for name in removed - kept - {_first_of(path)}:
        path.with_name(name).unlink(missing_ok=True)
