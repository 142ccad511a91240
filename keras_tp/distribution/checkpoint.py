"""Files that do not fit a model are found out before it is touched."""

import contextlib
import functools
import warnings
import zipfile

from keras.src.backend.common import global_state
from keras.src.backend.common.stateless_scope import StatelessScope
from keras.src.backend.common.stateless_scope import get_stateless_scope
from keras.src.distribution.distribution_lib import distribution


class UnreadableFileError(ValueError, OSError):
    """A file could not be read, where Keras raises an `OSError`.

    `BackupAndRestore` catches it and takes the file before the last.
    """


class _DryRun(StatelessScope):
    """Scope in which `assign` checks its value and then forgets it."""

    def __init__(self):
        super().__init__(initialize_variables=False)

    def add_update(self, update):
        pass


def check_before_loading(original):
    """Wraps `saving_lib.load_weights_only` with a pass that assigns nothing.

    The pass reads the whole file, one variable at a time, and compares each
    with the variable that it is for.
    """

    @functools.wraps(original)
    def load_weights_only(model, filepath, *args, **kwargs):
        if all(variable._layout is None for variable in model.variables):
            return original(model, filepath, *args, **kwargs)
        with _errors_name(filepath, "The model is unchanged."):
            with warnings.catch_warnings():
                # The real pass below gives the same warnings.
                warnings.simplefilter("ignore")
                with _DryRun():
                    original(model, filepath, *args, **kwargs)
        return original(model, filepath, *args, **kwargs)

    return load_weights_only


def outside_of_the_pass(original):
    """Wraps `saving_lib.get_attr_skipset`, which makes objects to look at."""

    @functools.wraps(original)
    def get_attr_skipset(obj_type):
        scope = get_stateless_scope()
        if not isinstance(scope, _DryRun):
            return original(obj_type)
        global_state.set_global_attribute("stateless_scope", None)
        try:
            return original(obj_type)
        finally:
            global_state.set_global_attribute("stateless_scope", scope)

    return get_attr_skipset


def name_file(original):
    """Wraps `saving_lib.load_model` so that its errors name the file."""

    @functools.wraps(original)
    def load_model(filepath, *args, **kwargs):
        if distribution() is None:
            return original(filepath, *args, **kwargs)
        with _errors_name(filepath, "No model was made."):
            return original(filepath, *args, **kwargs)

    return load_model


@contextlib.contextmanager
def _errors_name(filepath, consequence):
    try:
        yield
    except FileNotFoundError:
        raise
    except (EOFError, KeyError, OSError, ValueError, zipfile.BadZipFile) as e:
        kind = UnreadableFileError if isinstance(e, OSError) else ValueError
        raise kind(
            f"The file {str(filepath)!r} is damaged or does not fit the "
            f"model. {consequence} First problem: {e}"
        ) from e
