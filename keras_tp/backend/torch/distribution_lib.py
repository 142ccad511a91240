"""Distribution on torch: a variable is a `DTensor`, a device is a process.

Every process runs the same program, on the same global batch or on its part of
it, and DTensor's dispatcher inserts the collectives. The functions are those of
`docs/backend_interface.md`.
"""

import os
import sys

import torch
from keras.src.distribution.distribution_lib import distribution

from keras_tp.backend.hooks import backend_row
from keras_tp.backend.processes import engines
from keras_tp.backend.torch import batches
from keras_tp.backend.torch import collective_counter
from keras_tp.backend.torch import hooks
from keras_tp.backend.torch import launcher
from keras_tp.backend.torch import parts
from keras_tp.backend.torch import placement
from keras_tp.backend.torch import processes
from keras_tp.backend.torch import variables


def list_devices(device_type=None):
    """Returns the names of the devices of all processes, one per process."""
    default = "gpu" if processes.uses_cuda() else "cpu"
    kind = (device_type or default).lower()
    kind = "gpu" if kind == "cuda" else kind
    available = ("cpu", "gpu") if torch.cuda.is_available() else ("cpu",)
    if kind not in available:
        raise ValueError(
            f"torch has no devices of type {device_type!r} here; it has "
            f"{', '.join(available)}. Received: device_type={device_type!r}"
        )
    return [f"{kind}:{index}" for index in range(processes.world_size())]


def get_device_count(device_type=None):
    """Returns the number of devices of all processes."""
    return len(list_devices(device_type))


def initialize(job_addresses, num_processes, process_id):
    """Joins the other processes; without addresses, as the engine says.

    torchrun's variables have precedence over those of another engine.
    """
    if not {"RANK", "WORLD_SIZE"} <= set(os.environ):
        job_addresses, num_processes, process_id = engines.fill(
            job_addresses, num_processes, process_id
        )
    if job_addresses is None:
        processes.start()
        return
    first = job_addresses.split(",")[0]
    processes.start(f"tcp://{first}", num_processes, process_id)


def num_processes():
    """Returns the number of processes."""
    return processes.world_size()


def process_id():
    """Returns the index of this process."""
    return processes.index()


def from_first_process(value):
    """Returns the value of process 0, in every process. A collective."""
    return processes.from_first(value)


def meet(what):
    """Waits until every process is here. A collective."""
    processes.meet(what)


def collective_library(device_type):
    """Returns the library of torch's process group: `"gloo"` or `"nccl"`."""
    return processes.collective_library(device_type)


def activate():
    """Joins the other processes and agrees with them on one seed."""
    processes.start()
    processes.agree_on_seed()


def hook_table():
    """Returns the rows of torch's hook table."""
    return [backend_row(sys.modules[__name__]), *hooks.TABLE]


def is_tracing():
    """Returns whether torch compiles a function."""
    return torch.compiler.is_compiling()


def records_gradients():
    """Returns whether torch records operations for `backward`."""
    return torch.is_grad_enabled()


def splits_unevenly():
    """Returns whether a dim may be split that a mesh axis does not divide.

    The shards of a DTensor may differ in size.
    """
    return True


def splits_in_blocks():
    """Returns whether each block of a dim may be split.

    DTensor has a placement for it.
    """
    return True


def distribute_tensor(tensor, layout):
    """Changes the layout of a tensor; a plain one is equal in all processes."""
    placed = placement.as_placement(layout)
    if not isinstance(tensor, torch.Tensor) or tensor.device.type == "meta":
        return tensor
    if placed.mesh is None:
        return placement.to_full(tensor)
    if getattr(tensor, "device_mesh", None) != placed.mesh:
        # A plain tensor, or one of another mesh.
        tensor = placement.to_full(tensor)
        tensor = placement.replicate(tensor, placed.mesh)
    if tensor.placements == placed.placements:
        return tensor
    return placement.redistributed(tensor, placed.placements)


def distribute_data_input(per_process_batch, layout, batch_dim_name):
    """Returns a batch, of which this process brings all or its part, split.

    Parts take the distribution's layout instead of `layout`.
    """
    if per_process_batch is None:
        return None
    if batches.parts_of(distribution()) is not None:
        return batches.distribute_batch(per_process_batch)
    placed = placement.as_placement(layout)
    return batches.split_batch(per_process_batch, placed)


def relayout_variable(variable, layout):
    """Moves a variable to another layout; its value stays the same.

    A collective. Processes compare a plain value first, because each cuts its
    shard from its own.
    """
    old = variable._value
    if layout is not None and not isinstance(old, placement.DTensor):
        processes.same_values(variable)
    variables.move(variable, layout)
    variable._layout = layout
    # A torch layer may keep the old parameter until its parameters are updated.
    # The old value and gradient are freed now; otherwise moving a model would
    # double its memory.
    old.grad = None
    if isinstance(old, placement.DTensor):
        old._local_tensor = old._local_tensor.new_empty(0)
    else:
        old.data = old.data.new_empty(0)


def variable_bytes_by_device(variable):
    """Returns a dict of device name to the bytes it holds. A collective."""
    value = variable._value
    local = value.to_local() if isinstance(value, placement.DTensor) else value
    held = local.untyped_storage().nbytes()
    layout = variable._layout
    if layout is None:
        return {f"{_kind(local)}:{processes.index()}": held}
    devices = [str(d) for d in layout.device_mesh.devices.flatten()]
    if len(devices) == 1:
        return {devices[0]: held}
    by_process = processes.gather(held, "the bytes of a variable")
    return {
        name: by_process[int(name.split(":")[-1])] for name in sorted(devices)
    }


def peak_memory():
    """Returns a dict of accelerator to the most bytes in use on it so far."""
    if not processes.uses_cuda():
        return {}
    return {f"gpu:{processes.index()}": torch.cuda.max_memory_allocated()}


def variable_parts(variable):
    """Returns the part of a variable that this process holds, in a list."""
    return parts.held(variable)


def assign_parts(variable, part_of):
    """Sets a variable; each process takes its part of the new value."""
    parts.assign(variable, part_of)


def variable_axes(variable):
    """Returns the mesh axes that split each dim of a variable's live tensor."""
    if variable._layout is None:
        return None
    return placement.axes_of(variable._value, variable._layout)


def why_gathered(variable, layer):
    """Returns an empty string: each device computes with its part."""
    return ""


def count_collectives(model, x, y=None):
    """Counts the collectives of one step, which runs and is then undone."""
    return collective_counter.count_step(model, x, y)


def launch(plan, argv):
    """Runs a script in one process for each device."""
    launcher.launch(plan, argv)


def how_to_launch(device_count):
    """Returns a sentence on how to run this script on several devices."""
    return launcher.how_to_launch(device_count)


def _kind(tensor):
    return "gpu" if tensor.device.type == "cuda" else tensor.device.type


def _to_backend_device(device_name):
    kind, _, number = str(device_name).lower().partition(":")
    index = int(number or 0)
    world = processes.world_size()
    if index >= world:
        raise ValueError(
            f"Device {device_name!r} belongs to process {index}, and this run "
            f"has {world} process(es). {launcher.how_to_launch(index + 1)} "
            f"Received: device_name={device_name!r}"
        )
    return torch.device("cuda" if kind in ("gpu", "cuda") else kind)


def _to_backend_mesh(device_mesh):
    return placement.to_torch_mesh(device_mesh)


def _to_backend_layout(tensor_layout):
    if tensor_layout.device_mesh is None:
        raise ValueError(
            "A layout needs a mesh before it can place a tensor. Received: "
            f"{tensor_layout}"
        )
    return placement.to_placement(tensor_layout)
