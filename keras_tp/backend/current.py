"""The modules of Keras's current backend."""

import importlib
import os

import keras

# A new backend is a folder of this package and a row here.
SUPPORTED_BACKENDS = ("jax", "tensorflow", "torch", "torch_xla")


def name():
    """Returns the name of the backend in use.

    It is that of Keras's backend, but `"torch_xla"` if Keras makes its tensors
    on XLA's devices.
    """
    device = os.environ.get("KERAS_TORCH_DEVICE", "").partition(":")[0]
    if keras.config.backend() == "torch" and device == "xla":
        return "torch_xla"
    return keras.config.backend()


def load(module):
    """Returns a module of Keras's current backend.

    Args:
        module: String, such as `"distribution_lib"`.

    Raises:
        ValueError: if keras_tp does not support that backend.
    """
    own = name()
    if own not in SUPPORTED_BACKENDS:
        supported = ", ".join(repr(b) for b in SUPPORTED_BACKENDS)
        raise ValueError(
            f"keras_tp cannot distribute on the Keras backend {own!r}. "
            f"Supported backends: {supported}. Set the environment variable "
            "KERAS_BACKEND to one of them before Keras is imported. "
            f"Received: keras.config.backend()={own!r}"
        )
    return importlib.import_module(f"keras_tp.backend.{own}.{module}")
