"""Virtual CPU devices, which have to be made before TensorFlow starts."""

import os

import tensorflow as tf

# How many devices to make of this machine's CPU.
CPU_DEVICES = "KERAS_TP_CPU_DEVICES"


def make_virtual():
    """Makes the virtual devices that are asked for, if it is not too late."""
    count = _count()
    cpus = tf.config.list_physical_devices("CPU")
    if count < 1 or not cpus:
        return
    try:
        tf.config.set_logical_device_configuration(
            cpus[0], [tf.config.LogicalDeviceConfiguration()] * count
        )
    except RuntimeError:
        # TensorFlow has started. `check_virtual` says so to whoever needs
        # the devices.
        return


def check_virtual():
    """Makes the virtual devices; `ValueError` if it is too late for that."""
    make_virtual()
    count = _count()
    # Those of all processes, where there are several.
    found = len(tf.config.list_logical_devices("CPU"))
    if count > found:
        raise ValueError(
            f"TensorFlow has {found} CPU device(s) and had started before "
            f"{count} virtual ones could be made. Import keras_tp before the "
            "first computation, or run the script by `python -m "
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
