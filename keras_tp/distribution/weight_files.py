"""Checks that a file fits a model before the model changes."""

import contextlib
import os
import struct
import warnings
import zipfile
import zlib

import h5py
import numpy as np
from keras.src import backend
from keras.src.backend.common import global_state
from keras.src.backend.common.stateless_scope import StatelessScope
from keras.src.backend.common.stateless_scope import get_stateless_scope
from keras.src.distribution.distribution_lib import distribution
from keras.src.distribution.distribution_lib import set_distribution

from keras_tp.backend import hooks
from keras_tp.backend.processes import timeouts
from keras_tp.backend.saving import all_processes
from keras_tp.backend.saving import archives
from keras_tp.backend.saving import checked_reads
from keras_tp.backend.saving import digests
from keras_tp.backend.saving import expected_values
from keras_tp.backend.saving import stored_arrays
from keras_tp.distribution import model_state

# Errors from a damaged archive, JSON or HDF5. Plain `RuntimeError` is left out:
# missing processes raise it, and the file is not at fault.
_DAMAGE = (
    EOFError,
    KeyError,
    NotImplementedError,
    OSError,
    RecursionError,
    ValueError,
    struct.error,
    zipfile.BadZipFile,
    zlib.error,
)

# Processes may have a file under other paths.
_READ = "read a file of weights"


class _DryRun(StatelessScope):
    """Scope in which `assign` checks its value and then drops it.

    Args:
        reading: `checked_reads.Reading`, which has the last array of the file.

    Attributes:
        takes_arrays: `assign` does not convert an array that is in a file.
        converted: Dict from the path of each variable of another dtype to a
            pair: the dtype in the file, the dtype of the variable.
        with_nan: Dict from the path of each variable whose value has NaN to
            how many of its numbers are NaN.
    """

    takes_arrays = True

    def __init__(self, reading):
        super().__init__(initialize_variables=False)
        self._reading = reading
        self.converted = {}
        self.with_nan = {}

    def add_update(self, update):
        variable, _ = update
        value = self._reading.last
        if value is not None and value.shape == tuple(variable.shape):
            self._check_dtype(variable, value.dtype.name)
            if self._reading.is_own:
                self._count_nan(variable, value)

    def _check_dtype(self, variable, saved):
        held = backend.standardize_dtype(variable._dtype)
        if saved == held or saved.startswith("void"):
            return
        if _kind(saved) != _kind(held):
            raise ValueError(
                f"The value of {variable.path!r} was saved as {saved}, but the "
                f"variable has dtype {held}. Loading does not convert between "
                "these kinds of dtypes. Build the model with the saved dtypes. "
                f"Received: dtype={saved}"
            )
        self.converted[variable.path] = saved, held

    def _count_nan(self, variable, value):
        count = _nan_count(value)
        if count:
            self.with_nan[variable.path] = count


def _nan_count(value):
    if not backend.is_float_dtype(value.dtype.name):
        return 0
    blocks = [value]
    if stored_arrays.is_stored(value):
        blocks = stored_arrays.blocks(value)
    return sum(int(np.isnan(block).sum()) for block in blocks)


def _kind(dtype):
    return (
        "float" if backend.is_float_dtype(dtype) else dtype.rstrip("0123456789")
    )


@hooks.around
def check_before_loading(original, /, model, filepath, *args, **kwargs):
    """Wraps `saving_lib.load_weights_only` with a pass that assigns nothing.

    The pass reads the whole file, one value at a time, and compares each value
    with its variable. Several processes divide the large values among them.
    Then each process reads the parts that its devices hold.
    """
    if all(variable._layout is None for variable in model.variables):
        return original(model, filepath, *args, **kwargs)

    def checked(share):
        with checked_reads.checking(filepath, share=share) as reading:
            with _DryRun(reading) as run:
                original(model, filepath, *args, **kwargs)
        return run.converted, run.with_nan

    with _read_by_all(filepath, "The model is unchanged.") as read:
        with warnings.catch_warnings():
            # The real pass below gives the same warnings.
            warnings.simplefilter("ignore")
            found = read(checked)
        _report(filepath, found, _is_strict(model))
        return original(model, filepath, *args, **kwargs)


@contextlib.contextmanager
def _read_by_all(filepath, consequence):
    """Context in which each process reads its parts of one file.

    Yields a function that runs a function in all processes, and returns a list
    of their results. The function receives the share of the process, as in
    `all_processes.share_of`. Errors name the file.
    """
    # A process may come late: each may have downloaded the file.
    with timeouts.longer():
        share = all_processes.share_of(filepath)
        with _errors_name(filepath, consequence):
            is_in_place = archives.check(filepath, share)

        def read(function):
            def run():
                result = function(share)
                identity = None
                is_path = isinstance(filepath, (str, os.PathLike))
                if share[1] == 1 and is_path and os.path.exists(filepath):
                    identity = digests.identity(filepath)
                return identity, result

            with _errors_name(filepath, consequence):
                found = all_processes.run(run, _READ)
                _check_same(filepath, [identity for identity, _ in found])
            return [result for _, result in found]

        with checked_reads.in_parts(filepath if is_in_place else None):
            yield read


def _check_same(filepath, identities):
    """Raises if the processes have other files under one path."""
    for index, identity in enumerate(identities):
        if identity != identities[0]:
            raise ValueError(
                f"Process {index} has another file there than process 0. Copy "
                "one file to all machines, or use a folder that they share."
            )


def _is_strict(model):
    parallel = model_state.distribution_of(model)
    layout_map = getattr(parallel, "_layout_map", None)
    return getattr(parallel, "_strict", getattr(layout_map, "strict", False))


def _report(filepath, found, is_strict):
    """Warns of values that can be loaded but may not be meant; or raises."""
    problems, converted, with_nan = [], {}, {}
    for noted in found:
        converted.update(noted[0])
        with_nan.update(noted[1])
    for path, (saved, held) in list(converted.items())[:1]:
        problems.append(
            f"{len(converted)} variables have another dtype in the file "
            f"{str(filepath)!r} and are converted. The first is {path!r}: "
            f"saved as {saved}, now {held}."
        )
    problems += _nan_problem(filepath, with_nan)
    _tell(problems, is_strict, "The model is unchanged")


def _nan_problem(filepath, with_nan):
    return [
        f"{len(with_nan)} variables have NaN in the file {str(filepath)!r}. "
        f"The first is {path!r}: {count} of its numbers are NaN."
        for path, count in list(with_nan.items())[:1]
    ]


def _tell(problems, is_strict, consequence):
    if problems and is_strict:
        raise ValueError(
            f"{' '.join(problems)} {consequence}, because its "
            "distribution is strict. To load the file, use `strict=False`."
        )
    for problem in problems:
        warnings.warn(problem, stacklevel=5)


@hooks.around
def outside_of_the_pass(original, obj_type):
    """Wraps `saving_lib.get_attr_skipset` to make its sample objects apart.

    Their variables must not be made in the pass. Nor may they be made on the
    mesh: every process would have to make them, and one may save for all.
    """
    scope, parallel = get_stateless_scope(), distribution()
    is_pass = isinstance(scope, _DryRun)
    if is_pass:
        global_state.set_global_attribute("stateless_scope", None)
    set_distribution(None)
    try:
        return original(obj_type)
    finally:
        set_distribution(parallel)
        if is_pass:
            global_state.set_global_attribute("stateless_scope", scope)


@hooks.around
def name_file(original, /, filepath, *args, **kwargs):
    """Wraps a function that loads a model, so that its errors name the file.

    Each process reads the parts that its devices hold, and compares a share of
    the values with their digests.
    """
    if distribution() is None or isinstance(filepath, h5py.File):
        return original(filepath, *args, **kwargs)
    model, with_nan = None, {}

    def see(name, value):
        count = _nan_count(value)
        if count:
            with_nan[name] = count

    def made(share):
        nonlocal model
        with checked_reads.checking(filepath, see, share):
            with expected_values.context():
                model = original(filepath, *args, **kwargs)
        return with_nan

    with _read_by_all(filepath, "No model was made.") as read:
        found = read(made)
    with_nan = {name: n for noted in found for name, n in noted.items()}
    is_strict = bool(with_nan) and _is_strict(model)
    problems = _nan_problem(filepath, with_nan)
    _tell(problems, is_strict, "No model was made")
    return model


@contextlib.contextmanager
def _errors_name(filepath, consequence):
    try:
        yield
    except FileNotFoundError:
        raise
    except _DAMAGE as e:
        kind = ValueError
        if isinstance(e, OSError):
            kind = digests.UnreadableFileError
        raise kind(
            f"The file {str(filepath)!r} is damaged or does not fit the "
            f"model. {consequence} First problem: {e}"
        ) from e
