"""Imports Keras, and says how to install its backend if it is not there."""

import importlib.util
import os
import sys

from keras_tp import script_backend
from keras_tp import startup

# Each is an extra of this package.
BACKENDS = ("jax", "tensorflow", "torch")


def import_keras():
    """Imports Keras.

    `launch` runs its script in this process, so a backend that the script
    chooses is chosen here.

    Raises:
        ModuleNotFoundError: if its backend is not installed. The message says
            how to install it, and which ones are. A command of this package
            prints the message and exits with code 1.
    """
    arguments = startup.command()
    if arguments and arguments[0] == "launch":
        _choose_as(arguments[1:])
    try:
        importlib.import_module("keras")
    except ModuleNotFoundError as e:
        if e.name not in BACKENDS:
            raise
        message = _message(e.name)
        if arguments is not None:
            sys.exit(f"keras_tp: error: {message}")
        # Keras's own traceback adds nothing.
        raise ModuleNotFoundError(message, name=e.name) from None


def _choose_as(arguments):
    """Chooses the backend that a script sets before it imports Keras."""
    # The values of the launcher's options are no files.
    script = next(filter(os.path.isfile, arguments), None)
    if script is not None and not os.environ.get(script_backend.VARIABLE):
        chosen = script_backend.chosen_by(script).backend
        if chosen is not None:
            os.environ[script_backend.VARIABLE] = chosen


def _message(missing):
    name = script_backend.VARIABLE
    by = f" by the environment variable {name}"
    if not os.environ.get(name):
        by = f" (the environment variable {name} is not set)"
    message = (
        f"Keras is set to the backend {missing!r}{by}, which is not installed. "
    )
    others = [
        other
        for other in BACKENDS
        if other != missing and importlib.util.find_spec(other) is not None
    ]
    if others:
        settings = " or ".join(f"{name}={other}" for other in others)
        message += f"To use a backend that is installed, set {settings}. "
    extra = f"pip install 'keras_tp[{missing}]'"
    message += f"To install {missing!r}, run `{extra}`"
    if not others:
        rest = [repr(other) for other in BACKENDS if other != missing]
        message += f"; the same works for {' and '.join(rest)}"
    return f"{message}."


import_keras()
