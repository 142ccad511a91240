"""The XLA devices of this process, and meshes of them.

torch_xla runs one program on all devices of the process (SPMD). The devices and
the mode are fixed when the first tensor is made.
"""

import functools

import numpy as np
import torch_xla.runtime as xr
from keras.src.backend.common import global_state
from keras.src.backend.torch import core
from keras.src.distribution.distribution_lib import distribution
from torch_xla.distributed import spmd

from keras_tp.backend import current
from keras_tp.backend.processes import commands


def start():
    """Enters the mode in which one program runs on all devices."""
    if not xr.is_spmd():
        xr.use_spmd()


def kind():
    """Returns the type of the devices: `"cpu"`, `"tpu"` or `"gpu"`."""
    found = xr.device_type().lower()
    return "gpu" if found == "cuda" else found


def count():
    """Returns the number of devices."""
    start()
    return xr.global_runtime_device_count()


def names():
    """Returns the names of the devices, such as `"cpu:0"`."""
    return [f"{kind()}:{index}" for index in range(count())]


def variables(device_count):
    """Returns the environment variables of a process with devices.

    Args:
        device_count: Int, the number of virtual devices if there are no
            accelerators.
    """
    found = {"KERAS_BACKEND": "torch", current.CHOICE: "torch_xla"}
    if kind() == "cpu":
        found |= {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": str(device_count)}
    return found


def how_to_get(device_count):
    """Returns a sentence on how to run this script on several devices."""
    if kind() != "cpu":
        return f"This host needs {device_count} devices."
    if commands.in_notebook():
        return commands.before_import(device_count, variables(device_count))
    command = commands.launch(device_count)
    return f"To run on {device_count} devices: `{command}`."


def mesh_of(device_mesh):
    """Returns torch_xla's mesh of a Keras mesh; `None` for one CPU.

    Raises:
        ValueError: unless the mesh holds all devices, or is one CPU.
    """
    devices = [str(device) for device in device_mesh.devices.flatten()]
    own = names()
    if is_host(device_mesh):
        return None
    if sorted(devices) != sorted(own):
        raise ValueError(
            "torch_xla runs each program on all devices of the process, so a "
            f"mesh has to hold all {len(own)}: {own}. "
            f"{how_to_get(len(devices))} Received: devices={devices}"
        )
    indices = [own.index(name) for name in devices]
    return spmd.Mesh(
        np.array(indices),
        tuple(device_mesh.shape),
        tuple(device_mesh.axis_names),
    )


def is_host(device_mesh):
    """Returns whether a mesh is one CPU: torch alone then computes."""
    return device_mesh.devices.size == 1 and kind() == "cpu"


def of_keras():
    """Returns the device on which Keras makes plain tensors."""
    return core.DEFAULT_DEVICE


def hook_get_device(original):
    """Makes Keras use XLA's devices under a distribution."""

    @functools.wraps(original)
    def get_device():
        own = distribution()
        if (
            own is None
            or global_state.get_global_attribute("torch_device") is not None
            or is_host(own.device_mesh)
        ):
            return original()
        return "xla"

    return get_device
