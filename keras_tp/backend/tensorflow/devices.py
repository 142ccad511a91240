"""Virtual CPU devices, which have to be made before TensorFlow starts."""

import os

import tensorflow as tf

# The environment variable with the number of virtual CPU devices.
CPU_DEVICES = "KERAS_TP_CPU_DEVICES"


def make_virtual():
    """Makes the requested virtual devices, unless TensorFlow has started."""
    count = _count()
    cpus = tf.config.list_physical_devices("CPU")
    if count < 1 or not cpus:
        return
    try:
        tf.config.set_logical_device_configuration(
            cpus[0], [tf.config.LogicalDeviceConfiguration()] * count
        )
    except RuntimeError:
        # TensorFlow has started. `check_virtual` raises an error if the
        # devices are missing.
        return


def check_virtual():
    """Makes the virtual devices; raises `ValueError` if it is too late."""
    make_virtual()
    count = _count()
    # With several processes, this counts the devices of all of them.
    found = len(tf.config.list_logical_devices("CPU"))
    if count > found:
        raise ValueError(
            f"TensorFlow started with {found} CPU device(s), before keras_tp "
            f"could make {count} virtual ones. Import keras_tp before the "
            "first computation, or run the script with `python -m "
            f"keras_tp.launch --devices {count}`. Received: "
            f"{CPU_DEVICES}={count}"
        )


def _count():
    given = os.environ.get(CPU_DEVICES, "0")
    if not given.isdigit():
        raise ValueError(
            f"{CPU_DEVICES} must be a number of devices. Received: {given!r}"
        )
    return int(given)
