"""Imports Keras, and says how to install its backend if it is not there."""

import importlib

# Each is an extra of this package.
BACKENDS = ("jax", "tensorflow", "torch")


def import_keras():
    """Imports Keras.

    Raises:
        ModuleNotFoundError: if its backend is not installed. The message says
            how to install it.
    """
    try:
        importlib.import_module("keras")
    except ModuleNotFoundError as e:
        if e.name not in BACKENDS:
            raise
        raise ModuleNotFoundError(
            f"Keras is set to the backend {e.name!r}, which is not installed. "
            f"Install it, `pip install 'keras_tp[{e.name}]'`, or choose "
            'another with the environment variable KERAS_BACKEND: "jax", '
            '"tensorflow" or "torch".',
            name=e.name,
        ) from e


import_keras()
