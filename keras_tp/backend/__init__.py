"""The backend modules; `current.name()` is the one in use."""

from keras_tp import startup
from keras_tp.backend import communication
from keras_tp.backend import current
from keras_tp.backend.current import SUPPORTED_BACKENDS
from keras_tp.backend.current import load
from keras_tp.backend.processes import error_propagation
from keras_tp.backend.processes import unused_devices

# Runs first, so that the launcher also shows errors of later imports.
error_propagation.report_to_launcher()


def __getattr__(name):
    # Lazy, so that `import keras_tp` works (and patches nothing) on a
    # backend that cannot distribute; the first use raises.
    if name == "distribution_lib":
        globals()[name] = load(name)
        return globals()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


if current.name() == "torch":
    unused_devices.watch()
if current.name() in ("tensorflow", "torch_xla"):
    # They read some settings once, when they first run something.
    load("distribution_lib")
if current.name() == "torch_xla" and not startup.launches_others():
    # Before torch's first backward pass, which fixes the kinds of devices.
    load("devices").count()
