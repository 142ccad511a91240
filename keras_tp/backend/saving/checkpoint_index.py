"""The index of a checkpoint: a JSON file that lists its files and their parts.

`weight_map` is the one of Hugging Face. The metadata has more of each part, and
a SHA-256 of it all.
"""

import json
import math

from keras_tp.backend.saving import digests
from keras_tp.backend.saving import tensor_files

INDEX = "model.safetensors.index.json"
_FORMAT = 1
_ADDED = "keras_tp"


def text_for(tensors, described):
    """Returns the text of an index.

    Args:
        tensors: Dict from a tensor's name to a dict of its `dtype`, `shape`
            and `parts`: a list of dicts with `key`, `file`, `box`, `sha256`.
        described: Dict for people, such as the layouts.
    """
    added = {"format": _FORMAT, "tensors": tensors, "described": described}
    sizes = [
        math.prod(held["shape"])
        * tensor_files.numpy_dtype(held["dtype"]).itemsize
        for held in tensors.values()
    ]
    return json.dumps(
        {
            "metadata": {
                "total_size": sum(sizes),
                _ADDED: {**added, "sha256": digests.digest_of_json(added)},
            },
            "weight_map": _map_of(tensors),
        },
        indent=1,
    )


def text_of(folder):
    """Returns the bytes of the index in a folder."""
    index = folder / INDEX
    if folder.is_file():
        raise FileNotFoundError(
            f"'{folder}' is a file. A checkpoint is a folder with a file "
            f"'{INDEX}', as `save_checkpoint` writes it."
        )
    if not index.is_file():
        raise FileNotFoundError(
            f"There is no checkpoint in '{folder}': it has no file '{INDEX}'."
        )
    return index.read_bytes()


def checked(text, folder):
    """Returns what keras_tp added to an index, as a dict, and its SHA-256.

    Args:
        text: Bytes of the index.
        folder: Path of the folder, for errors.

    Raises:
        ValueError: if it is not as `save_checkpoint` wrote it.
    """
    index = folder / INDEX
    try:
        config = json.loads(text, object_pairs_hook=_once)
    except (ValueError, RecursionError) as e:
        raise ValueError(f"'{index}' is damaged: {e}") from e
    added = config["metadata"].get(_ADDED)
    if added is None:
        raise ValueError(
            f"'{index}' was not written by `save_checkpoint`: it has no "
            f"{_ADDED!r} in its metadata."
        )
    if added["format"] != _FORMAT:
        raise ValueError(
            f"'{index}' has the format {added['format']!r}; this version of "
            f"keras_tp reads {_FORMAT}."
        )
    sha256 = added.pop("sha256")
    if sha256 != digests.digest_of_json(added):
        raise ValueError(
            f"'{index}' is not as it was saved: its SHA-256 differs."
        )
    if config["weight_map"] != _map_of(added["tensors"]):
        raise ValueError(
            f"The `weight_map` of '{index}' is not the one that was saved."
        )
    return added, sha256


def _map_of(tensors):
    return {
        part["key"]: part["file"]
        for held in tensors.values()
        for part in held["parts"]
    }


def _once(pairs):
    """Returns a dict of the pairs of a JSON object; refuses a name twice."""
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"The index lists {twice!r} twice.")
    return found
