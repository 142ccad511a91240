"""The modules of Keras's current backend."""

import importlib

import keras

# A new backend is a folder of this package and a row here.
SUPPORTED_BACKENDS = ("jax", "tensorflow", "torch")


def load(module):
    """Returns a module of Keras's current backend.

    Args:
        module: String, such as `"distribution_lib"`.

    Raises:
        ValueError: if keras_tp does not support that backend.
    """
    name = keras.config.backend()
    if name not in SUPPORTED_BACKENDS:
        supported = ", ".join(repr(b) for b in SUPPORTED_BACKENDS)
        raise ValueError(
            f"keras_tp cannot distribute on the Keras backend {name!r}. "
            f"Supported backends: {supported}. Set the environment variable "
            "KERAS_BACKEND to one of them before Keras is imported. "
            f"Received: keras.config.backend()={name!r}"
        )
    return importlib.import_module(f"keras_tp.backend.{name}.{module}")
