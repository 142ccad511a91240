"""The backend modules; the one in use is chosen by Keras's own setting."""

import importlib

import keras

from keras_tp.backend.processes import error_propagation

# Before anything can fail that imports keras_tp.
error_propagation.report_to_launcher()

# A new backend is a folder of this package and a row here.
SUPPORTED_BACKENDS = ("jax", "tensorflow", "torch")


# What a backend's folder offers; see CONTRIBUTING.md.
_MODULES = ("distribution_lib", "communication")


def _load(module):
    """Returns a module of Keras's current backend.

    Args:
        module: String, one of `_MODULES`.

    Raises:
        ValueError: if that backend has no distributed runtime that keras_tp
            knows.
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
    # backend that cannot distribute; the first use says so.
    if name in _MODULES:
        globals()[name] = _load(name)
        return globals()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


if keras.config.backend() == "tensorflow":
    # TensorFlow reads some settings once, when it first runs something.
    _load("distribution_lib")
