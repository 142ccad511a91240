"""The config and the assets of a model in a checkpoint.

Assets are files that layers write, such as vocabularies. In a checkpoint each
file is a tensor of bytes: it is listed, compared and replaced like the others.
"""

import contextlib
import pathlib
import tempfile

import numpy as np
from keras.src.saving import saving_lib

from keras_tp.backend.saving import checkpoint_folder
from keras_tp.backend.saving import digests
from keras_tp.distribution import checkpoint_state

# What the `get_config` of a model raises if it has none.
_NO_CONFIG = (
    AttributeError,
    LookupError,
    NotImplementedError,
    RecursionError,
    TypeError,
    ValueError,
)
_BYTES = "uint8"


def described(model):
    """Returns a dict of the model's config; why, if it cannot be serialized."""
    try:
        with _whole_compile_config(model):
            config, _ = saving_lib._serialize_model_as_json(model)
    except _NO_CONFIG as e:
        return {"config": None, "no_config": f"{type(e).__name__}: {e}"}
    return {"config": config}


@contextlib.contextmanager
def _whole_compile_config(model):
    """Puts back the optimizer, which Keras takes out when it saves `.h5`."""
    optimizer = getattr(model, "optimizer", None)
    held = getattr(getattr(model, "_compile_config", None), "config", None)
    if held is None or optimizer is None or "optimizer" in held:
        yield
        return
    held["optimizer"] = optimizer
    try:
        yield
    finally:
        del held["optimizer"]


def model_of(folder, custom_objects, compile, safe_mode):
    """Makes the model that a `CheckpointFolder` describes.

    Raises:
        ValueError: if it has no config, or if the config needs code that
            `safe_mode` does not run.
    """
    config = folder.described.get("config")
    if config is None:
        reason = folder.described.get("no_config", "it was not saved")
        raise ValueError(
            f"The checkpoint in '{folder.path}' has no config of its model. "
            "Build and compile the model as when it was saved, and load the "
            "folder with `model.load_weights` or "
            "`keras_tp.distribution.load_checkpoint`. Received from "
            f"`get_config` when it was saved: {reason}"
        )
    return saving_lib._model_from_config(
        config, custom_objects, compile, safe_mode
    )


def asset_pieces(model):
    """Returns a `Piece` for each file that the model's layers write."""
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for index, (path, saveable) in enumerate(_with_assets(model)):
            own = pathlib.Path(folder, str(index))
            own.mkdir()
            saveable.save_assets(str(own))
            for file in sorted(filter(pathlib.Path.is_file, own.rglob("*"))):
                name = _prefix(path) + file.relative_to(own).as_posix()
                found.append(_piece(name, file.read_bytes()))
    return found


def _piece(name, data):
    array = np.frombuffer(data, _BYTES)
    return checkpoint_folder.Piece(
        name, array.shape, _BYTES, ((0, array.size),), lambda: array
    )


def load_assets(folder, model):
    """Gives the model's layers the files that they wrote.

    Raises:
        UnreadableFileError: if a file is damaged, or if its name leaves the
            folder of its layer.
    """
    for path, saveable in _with_assets(model):
        prefix = _prefix(path)
        names = [name for name in folder.tensors if name.startswith(prefix)]
        if not names:
            continue
        with tempfile.TemporaryDirectory() as own:
            for name in names:
                file = _inside(own, name.removeprefix(prefix))
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_bytes(_bytes_of(folder, name))
            saveable.load_assets(own)


def _with_assets(model):
    for path, saveable in checkpoint_state.parts_of(model):
        if hasattr(saveable, "save_assets"):
            yield path, saveable


def _prefix(path):
    return f"{checkpoint_state.ASSETS}{path}/@/"


def _inside(folder, name):
    """Returns the path of a file in a folder; refuses names that leave it."""
    relative = pathlib.PurePosixPath(name)
    if relative.is_absolute() or {"..", "."} & set(name.split("/")):
        raise digests.UnreadableFileError(
            "A file of a layer must be in the layer's own folder. Received: "
            f"{name!r}"
        )
    return pathlib.Path(folder, *relative.parts)


def _bytes_of(folder, name):
    (shape, dtype) = folder.tensors[name]
    if dtype != _BYTES or len(shape) != 1:
        raise digests.UnreadableFileError(
            f"The file {name!r} must be a tensor of bytes. Received: {dtype} "
            f"of shape {shape}"
        )
    box = ((0, shape[0]),)
    folder.check(name, [box])
    array = np.empty(shape, dtype)
    folder.copy_to(array, name, box)
    return array.tobytes()
