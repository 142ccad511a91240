"""The backend modules; `keras.config.backend()` selects the one in use."""

import importlib

import keras

from keras_tp.backend.processes import error_propagation

# Runs first, so that the launcher also shows errors of later imports.
error_propagation.report_to_launcher()

# A new backend is a folder of this package and a row here.
SUPPORTED_BACKENDS = ("jax", "tensorflow", "torch")


# The modules of every backend's folder; see CONTRIBUTING.md.
_MODULES = ("distribution_lib", "communication")


def _load(module):
    """Returns a module of Keras's current backend.

    Args:
        module: String, one of `_MODULES`.

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


def __getattr__(name):
    # Lazy, so that `import keras_tp` works (and patches nothing) on a
    # backend that cannot distribute; the first use raises.
    if name in _MODULES:
        globals()[name] = _load(name)
        return globals()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


if keras.config.backend() == "tensorflow":
    # Sets options that TensorFlow reads once, at its first operation.
    _load("distribution_lib")
