"""The modules of the backend in use."""

import functools
import importlib
import importlib.metadata
import os

import keras

# A new backend is a folder of this package and a row here.
SUPPORTED_BACKENDS = ("jax", "tensorflow", "torch", "torch_xla")
# Those that are not called like the backend of Keras that they run under.
_UNDER = {"torch_xla": "torch"}
# Other packages register a backend as an entry point of this group: its name,
# and the package that has its modules.
GROUP = "keras_tp.backends"
# The environment variable that chooses a backend. By default it is the one that
# is called like Keras's.
CHOICE = "KERAS_TP_BACKEND"
# The one that tells Keras where torch makes its tensors.
_TORCH_DEVICE = "KERAS_TORCH_DEVICE"


def name():
    """Returns the name of the backend in use.

    If Keras makes torch's tensors on XLA's devices, that is `"torch_xla"`.
    """
    own = keras.config.backend()
    device = os.environ.get(_TORCH_DEVICE, "").partition(":")[0]
    if own == "torch" and device == "xla":
        own = "torch_xla"
    return os.environ.get(CHOICE) or own


def load(module):
    """Returns a module of the backend in use.

    Args:
        module: String, such as `"distribution_lib"`.

    Raises:
        ValueError: if there is no such backend, or if it is not for Keras's
            backend.
    """
    own = keras.config.backend()
    if name() in SUPPORTED_BACKENDS and _UNDER.get(name(), name()) != own:
        raise ValueError(
            f"{CHOICE} is {name()!r}, and Keras runs on {own!r}. Leave "
            f"{CHOICE} out: keras_tp then takes its backend for {own!r}."
        )
    return importlib.import_module(f"{package(name())}.{module}")


def registered():
    """Returns a dict of each backend of other packages to its package."""
    found = importlib.metadata.entry_points(group=GROUP)
    return {entry.name: entry.value for entry in found}


@functools.cache
def package(backend):
    """Returns the name of the package with the modules of a backend.

    Args:
        backend: String, its name.

    Raises:
        ValueError: if there is no such backend.
    """
    if backend in SUPPORTED_BACKENDS:
        return f"keras_tp.backend.{backend}"
    others = registered()
    if backend in others:
        return others[backend]
    known = ", ".join(map(repr, [*SUPPORTED_BACKENDS, *others]))
    if backend != keras.config.backend():
        raise ValueError(
            f"There is no backend {backend!r}. There are: {known}. Other "
            f"packages register one as an entry point of the group {GROUP!r}."
        )
    raise ValueError(
        f"keras_tp cannot distribute on the Keras backend {backend!r}. "
        f"Supported backends: {known}. Set the environment variable "
        "KERAS_BACKEND to one of them before Keras is imported. "
        f"Received: keras.config.backend()={backend!r}"
    )
