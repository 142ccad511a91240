"""The XLA devices of this process, and meshes of them.

torch_xla runs one program on all devices of the process (SPMD). The devices and
the mode are fixed when the first tensor is made.
"""

import os

import numpy as np
import torch_xla
import torch_xla.runtime as xr
from torch_xla.distributed import spmd

# Where XLA writes the programs that it compiles; see `compiled_programs`.
_DUMP = "--xla_dump_to"


def start():
    """Enters the mode in which one program runs on all devices."""
    if not xr.is_spmd():
        xr.use_spmd()


def kind():
    """Returns the type of the devices: `"cpu"`, `"tpu"` or `"gpu"`."""
    found = xr.device_type().lower()
    return {"cuda": "gpu", "neuron": "neuron"}.get(found, found)


def count():
    """Returns the number of devices."""
    start()
    return xr.global_runtime_device_count()


def names():
    """Returns the names of the devices, such as `"cpu:0"`."""
    return [f"{kind()}:{index}" for index in range(count())]


def how_to_get(device_count):
    """Returns a sentence on how to run this script on several devices."""
    if os.environ.get("PJRT_DEVICE", "CPU") == "CPU":
        return (
            f"To run on {device_count} virtual devices, set "
            f"PJRT_DEVICE=CPU and CPU_NUM_DEVICES={device_count} before "
            "torch_xla is imported."
        )
    return f"This host needs {device_count} devices."


def mesh_of(device_mesh):
    """Returns torch_xla's mesh of a Keras mesh.

    Raises:
        ValueError: unless the mesh holds all devices.
    """
    devices = [str(device) for device in device_mesh.devices.flatten()]
    own = names()
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


def wait():
    """Runs what was recorded since the last call, in one program."""
    torch_xla.sync()
