"""What a backend says of itself: `conformance.py` in its package.

The module imports no framework. It may have:

- `KERAS_BACKEND`: String, the backend of Keras that it runs under. Defaults to
  the backend's own name.
- `CANNOT`: Dict of the name of a test, `"test_bad_input"` or with its case,
  `"test_training[uneven]"`, to the reason why it cannot pass.
- `CANNOT_BETWEEN_PROCESSES`: Dict of the same form, for runs of several
  processes.
"""

import importlib
import importlib.util

from keras_tp.backend import current


def module_of(backend):
    """Returns the `conformance` module of a backend; `None` without one."""
    package = current.package(backend)
    name = f"{package}.conformance"
    if importlib.util.find_spec(name) is None:
        return None
    return importlib.import_module(name)


def keras_backend(backend):
    """Returns the name of the backend of Keras that a backend runs under."""
    return getattr(module_of(backend), "KERAS_BACKEND", backend)


def cannot(backend, num_processes=1):
    """Returns a dict of each declared test to its reason.

    Args:
        backend: String, its name.
        num_processes: Int, how many processes run the tests.
    """
    module = module_of(backend)
    found = dict(getattr(module, "CANNOT", {}))
    if num_processes > 1:
        found |= getattr(module, "CANNOT_BETWEEN_PROCESSES", {})
    return found
