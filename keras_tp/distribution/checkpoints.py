"""Saves and loads a model as a folder of safetensors files.

No process ever holds more than its own part of a variable: each one writes its
part, and reads what its devices hold, whatever mesh, number of processes or
backend wrote the folder.
"""

import contextlib
import functools
import os
import pathlib
import secrets
import time
import traceback
from concurrent import futures

import keras
import numpy as np

from keras_tp import backend
from keras_tp.backend import random_state
from keras_tp.backend.processes import timeouts
from keras_tp.backend.saving import all_processes
from keras_tp.backend.saving import checkpoint_folder
from keras_tp.backend.saving import consolidation
from keras_tp.backend.saving import expected_values
from keras_tp.distribution import checkpoint_models
from keras_tp.distribution import checkpoint_state
from keras_tp.distribution import model_state

_READ, _WRITE = "read a checkpoint", "write a checkpoint"
# In all 43 seconds, in which processes may find different checkpoints.
_ATTEMPTS, _PAUSE_S = 30, 0.1
# The save that was started last, until it is waited for.
_running = []


def save_checkpoint(path, model, wait=True):
    """Saves the state of a model as a folder of safetensors files.

    Every process writes its own part of each variable: weights, optimizer
    slots, the number of the step, metrics and random state. The model's config
    and assets are saved, too, for `load_model`. The files become
    the current ones with one rename. If a process is killed before it, the
    older checkpoint in the folder stays. A collective: call it in every
    process, with a folder that all of them share.

    `model.safetensors.index.json` lists the files, as Hugging Face's do. A
    variable that is split has the indices of each part after its name, as in
    `layers/dense/vars/0[0:64,0:128]`.

    `model.save`, `model.save_weights` and callbacks write such a folder if
    their path ends in `.safetensors`.

    Args:
        path: String or path of the folder. It is created if it does not exist.
        model: Built `keras.Model`.
        wait: Boolean. With `False` training goes on while a thread writes the
            files. The values are those of this call: the process copies its
            part of the variables. An error of the thread is printed, and raised
            by the next call of `save_checkpoint` or `load_checkpoint`.
            Defaults to `True`.

    Raises:
        ValueError: if the model is not built.
        OSError: if a process cannot write. The older checkpoint is unchanged.
    """
    write(path, model, wait)


def write(path, model, wait=True, progress=None):
    """Does `save_checkpoint`, and saves the progress of training beside it.

    Args:
        path: String or path.
        model: Built `keras.Model`.
        wait: Boolean.
        progress: Value that JSON supports. Defaults to `None`.
    """
    _finish()
    _check_built(model, "saved")
    _sync(model)
    lib = backend.load("distribution_lib")
    pieces = [
        piece
        for name, value, _ in checkpoint_state.state_of(model)
        for piece in checkpoint_state.written_pieces(lib, name, value)
    ]
    assets = checkpoint_models.asset_pieces(model)
    if lib.process_id() == 0:
        pieces += assets
    save = checkpoint_folder.Save(
        pathlib.Path(os.path.realpath(path)),
        lib.from_first_process(secrets.token_hex(4)),
        lib.process_id(),
        lib.num_processes(),
    )
    described = {**_description_of(model), "progress": progress}
    with timeouts.longer(), contextlib.ExitStack() as undone:
        undone.callback(save.abandon)
        all_processes.run(save.begin, _WRITE)
        if not wait:
            _write_in_thread(save, pieces, described)
            undone.pop_all()
            return
        all_processes.run(lambda: save.write(pieces), _WRITE)
        seconds = timeouts.timeout()
        all_processes.run(lambda: save.publish(described, seconds), _WRITE)
        undone.pop_all()


def _write_in_thread(save, pieces, described):
    """Writes a checkpoint in a thread, which the interpreter waits for."""
    # Copies, because training changes the variables.
    pieces = [
        piece._replace(
            read=functools.partial(np.asarray, np.array(piece.read()))
        )
        for piece in pieces
    ]

    def run():
        is_written = False
        try:
            save.write(pieces)
            save.publish(described, timeouts.LONGEST_S)
            is_written = True
        finally:
            if not is_written:
                # There may be no next call, which would raise it.
                traceback.print_exc()

    executor = futures.ThreadPoolExecutor(1, "keras_tp checkpoint")
    written = executor.submit(run)
    executor.shutdown(wait=False)
    _running.append(written)


def _finish():
    """Waits for a save in a thread. A collective if one was started."""
    while _running:
        written = _running.pop()
        backend.load("distribution_lib").meet("The end of `save_checkpoint`")
        with timeouts.longer():
            all_processes.run(written.result, _WRITE)


def load_checkpoint(path, model):
    """Loads the state of a model from a folder of safetensors files.

    Each process reads the parts that its devices hold. The mesh, the number of
    processes and the backend may differ from those that saved the folder. All
    that is read is compared with its SHA-256 before a variable changes. A
    collective: call it in every process.

    The random state of Python, numpy and the framework is set, too, so that
    training goes on as it would have.

    Args:
        path: String or path of a folder that `save_checkpoint` wrote.
        model: Built `keras.Model` with the layers that were saved. If it is
            compiled, its optimizer is loaded too; otherwise the optimizer's
            variables in the folder are left out.

    Raises:
        FileNotFoundError: if there is no checkpoint in the folder.
        ValueError: if a file is damaged or does not fit the model, with the
            name of the file or the variable. The model is unchanged.
    """
    read(path, model)


def read(path, model):
    """Does `load_checkpoint`; returns the progress that `write` was given."""
    _finish()
    _check_built(model, "loaded")
    _sync(model)
    folder = _opened(path, "`load_checkpoint`")
    _load(folder, model)
    return folder.described.get("progress")


def load_model(path, custom_objects=None, compile=True, safe_mode=True):
    """Makes a model under the current distribution, and loads its state.

    A collective, like `load_checkpoint`.

    Args:
        path: String or path of a folder that `save_checkpoint` wrote.
        custom_objects: As in `keras.saving.load_model`.
        compile: As in `keras.saving.load_model`.
        safe_mode: As in `keras.saving.load_model`.

    Returns:
        A `keras.Model`.

    Raises:
        FileNotFoundError: if there is no checkpoint in the folder.
        ValueError: if the folder has no config, if a file is damaged, or if
            the config needs code that `safe_mode` does not run.
    """
    _finish()
    folder = _opened(path, "`load_model`")
    with expected_values.context():
        model = checkpoint_models.model_of(
            folder, custom_objects, compile, safe_mode
        )
        _check_built(model, "loaded")
        _load(folder, model, is_new=True)
    all_processes.run(
        lambda: checkpoint_models.load_assets(folder, model), _READ
    )
    return model


def _load(folder, model, is_new=False):
    """Loads a model's state, after all that is read was compared."""
    lib, state = backend.load("distribution_lib"), []

    def check():
        checkpoint_state.check_fits(folder, state)
        if share[1] > 1:
            folder.check_share([name for name, *_ in state], share)
            return
        for name, value, owner in state:
            boxes = checkpoint_state.held_boxes(lib, value, whole=owner)
            folder.check(name, boxes)

    with timeouts.longer():
        checkpoint_state.build_optimizer(model, folder)
        state = checkpoint_state.state_of(model, folder, is_new)
        share = all_processes.share_of(folder.index)
        all_processes.run(check, _READ)
        for name, value, owner in state:
            if owner is None:
                read_part = checkpoint_state.reader(folder, name, value)
                with expected_values.loaded(value):
                    lib.assign_parts(value, read_part)
        checkpoint_state.load_owners(folder, state)
        random_state.restore(model, folder.described["random"])


def _opened(path, what):
    """Returns the `CheckpointFolder`, the same one in all processes.

    A collective.

    Args:
        path: String or path.
        what: String, name of the function for users that reads it.
    """
    folder = None

    def read():
        nonlocal folder
        folder = checkpoint_folder.CheckpointFolder(path)
        return folder.sha256

    backend.load("distribution_lib").meet(what)
    with timeouts.longer():
        for attempt in range(_ATTEMPTS):
            found = all_processes.run(read, _READ)
            if len(set(found)) == 1:
                return folder
            # Another run saved a newer one in between, or a network file
            # system shows the older one to some processes for a while.
            time.sleep(_PAUSE_S * attempt)
    raise OSError(
        f"The processes find different checkpoints in '{path}'. Load from a "
        "folder that all of them share. Received: digests that begin with "
        f"{[digest[:8] for digest in found]}"
    )


def consolidate(path, filepath):
    """Makes a weights file of a checkpoint, which plain Keras loads.

    One tensor at a time is in memory. It needs no model and no distribution:
    call it in one process.

    Args:
        path: String or path of a folder that `save_checkpoint` wrote.
        filepath: String or path of the file, which ends in `.weights.h5`. It
            holds weights and optimizer slots, for `model.load_weights`.

    Raises:
        FileNotFoundError: if there is no checkpoint in the folder.
        ValueError: if `filepath` has another ending, or if a file is damaged.
    """
    if not str(filepath).endswith(consolidation.SUFFIX):
        raise ValueError(
            "The name of the file must end in `.weights.h5`. Received: "
            f"filepath='{filepath}'"
        )
    beside = f"{checkpoint_state.REST}/", f"{checkpoint_state.ASSETS}/"
    consolidation.consolidate(path, filepath, beside)


def _check_built(model, done):
    if not model.built:
        raise ValueError(
            f"Model {model.name!r} is not built, so it has no variables to be "
            f"{done}. Call it on a batch, or `build`, before."
        )


def _sync(model):
    """Gives the variables the values that `fit` on JAX keeps beside them.

    Keras does so where a callback reads `self.model`.
    """
    if hasattr(model, "jax_state_sync"):
        model.jax_state_sync()


def _description_of(model):
    """Returns a dict of what a person may want to know of a checkpoint."""
    parallel = model_state.distribution_of(model)
    mesh = getattr(parallel, "device_mesh", None)
    layouts = {
        variable.path: [
            list(axis) if isinstance(axis, tuple) else axis
            for axis in variable._layout.axes
        ]
        for variable, _ in model_state.variables_of(model)
        if hasattr(variable._layout, "axes")
    }
    return {
        "model": model.name,
        "backend": keras.config.backend(),
        "keras": keras.__version__,
        "mesh": mesh and dict(zip(mesh.axis_names, map(int, mesh.shape))),
        "layouts": layouts,
        "random": random_state.noted(model),
        **checkpoint_models.described(model),
    }
