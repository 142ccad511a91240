"""Distribution on torch_xla: a variable is a tensor with an SPMD sharding.

XLA inserts the collectives. The environment variable
`KERAS_TP_BACKEND=torch_xla` chooses this backend: models that have a
distribution are then on XLA's devices, and others where Keras's torch backend
makes them. The functions are those of `docs/backend_interface.md`.
"""

import os
import shlex
import sys

import torch
from keras.src.backend.torch import core

from keras_tp.backend.hooks import backend_row
from keras_tp.backend.processes import commands
from keras_tp.backend.processes import engine_commands
from keras_tp.backend.torch_xla import batches
from keras_tp.backend.torch_xla import collective_counter
from keras_tp.backend.torch_xla import devices
from keras_tp.backend.torch_xla import hooks
from keras_tp.backend.torch_xla import parts
from keras_tp.backend.torch_xla import placement
from keras_tp.backend.torch_xla import variables

# Both are read when XLA starts.
collective_counter.keep_programs()
devices.start()


def list_devices(device_type=None):
    """Returns the names of the XLA devices of this process.

    Args:
        device_type: String, such as `"cpu"` or `"tpu"`. Defaults to the type
            of the devices that there are.
    """
    if device_type not in (None, devices.kind()):
        raise ValueError(
            f"torch_xla has no devices of type {device_type!r} here; it runs "
            f"on {devices.kind()!r} (PJRT_DEVICE). Received: "
            f"device_type={device_type!r}"
        )
    return devices.names()


def get_device_count(device_type=None):
    """Returns the number of devices."""
    return len(list_devices(device_type))


def initialize(job_addresses, num_processes, process_id):
    """Does nothing for one process; several are not supported.

    Raises:
        NotImplementedError: if there are to be other processes.
    """
    if num_processes not in (None, 1):
        raise NotImplementedError(
            "On torch_xla, keras_tp runs in one process, with all devices of "
            "its host. For several processes, use Keras's JAX backend. "
            f"Received: num_processes={num_processes}"
        )


def num_processes():
    """Returns the number of processes."""
    return 1


def process_id():
    """Returns the index of this process."""
    return 0


def from_first_process(value):
    """Returns the value of process 0."""
    return value


def meet(what):
    """Waits for the other processes, of which there are none."""


def collective_library(device_type):
    """Returns the name of the library that moves tensors between devices."""
    return "torch_xla"


def activate():
    """Does nothing: all settings are read when XLA starts."""


def hook_table():
    """Returns the rows of the hook table."""
    return [backend_row(sys.modules[__name__]), *hooks.TABLE]


def is_tracing():
    """Returns whether torch compiles a function."""
    return torch.compiler.is_compiling()


def records_gradients():
    """Returns whether torch records operations for `backward`."""
    return torch.is_grad_enabled()


def splits_unevenly():
    """Returns whether a dim may be split that a mesh axis does not divide.

    XLA pads the last part.
    """
    return True


def splits_in_blocks():
    """Returns whether each block of a dim may be split. XLA cannot."""
    return False


def distribute_tensor(tensor, layout):
    """Changes the layout of a tensor, or of a result in a program."""
    placed = placement.as_placement(layout)
    if not isinstance(tensor, torch.Tensor) or tensor.device.type == "meta":
        return tensor
    if placed.mesh is None:
        return core.convert_to_tensor(tensor)
    tensor = core.convert_to_tensor(tensor).to("xla")
    return placement.constrained(tensor, placed)


def distribute_data_input(per_process_batch, layout, batch_dim_name):
    """Returns a batch on the devices, split."""
    if per_process_batch is None:
        return None
    placed = placement.as_placement(layout)
    return batches.split_batch(per_process_batch, placed)


def relayout_variable(variable, layout):
    """Moves a variable to another layout; its value stays the same."""
    variables.move(variable, layout)
    variable._layout = layout


def variable_bytes_by_device(variable):
    """Returns a dict of device name to bytes of a variable on that device."""
    value = variable._value.detach()
    if not placement.is_xla(value):
        return {f"{devices.kind()}:0": value.untyped_storage().nbytes()}
    return {
        device: part.numel() * part.itemsize
        for device, part, _ in placement.shards(value)
    }


def peak_memory():
    """Returns a dict of accelerator to the most bytes in use on it so far.

    Empty: torch_xla does not say it of each device of a program.
    """
    return {}


def variable_parts(variable):
    """Returns the parts of a variable on the devices, each once."""
    return parts.held(variable)


def assign_parts(variable, part_of):
    """Sets a variable; each device takes its part of the new value."""
    parts.assign(variable, part_of)


def variable_axes(variable):
    """Returns the mesh axes that split each dim, read from the live tensor."""
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
    """Runs a script on a number of devices, in this process.

    Keras and XLA read the environment when they start. If it has to change,
    the launcher replaces this process.

    Args:
        plan: `supervisor.Plan`.
        argv: List of strings: the script and its arguments.
    """
    plan = plan.with_processes()
    wanted = devices.variables(plan.devices)
    if plan.processes > 1:
        raise ValueError(
            "On torch_xla, one process has all devices of its host. Leave "
            "`--processes` and `--hosts` out. Received: "
            f"processes={plan.processes}"
        )
    if plan.engine is not None:
        engine_commands.show(plan, argv, devices.variables)
        return
    command = [sys.executable, "-m", "keras_tp.launch", "--devices"]
    command += [str(plan.devices), *argv]
    if plan.dry_run:
        told = [f"{name}={value}" for name, value in wanted.items()]
        sys.stdout.write(" ".join([*told, shlex.join(command)]) + "\n")
        return
    if any(os.environ.get(name) != wanted[name] for name in wanted):
        collective_counter.forget_programs()
        os.execve(sys.executable, command, {**os.environ, **wanted})
    if devices.count() < plan.devices:
        raise ValueError(
            f"The run needs {plan.devices} devices, but torch_xla has "
            f"{devices.count()}. {devices.how_to_get(plan.devices)}"
        )
    commands.run_script(argv, plan.devices)


def how_to_launch(device_count):
    """Returns a sentence on how to run this script on several devices."""
    return devices.how_to_get(device_count)


def _to_backend_device(device_name):
    return torch.device("xla")


def _to_backend_mesh(device_mesh):
    return devices.mesh_of(device_mesh)


def _to_backend_layout(tensor_layout):
    if tensor_layout.device_mesh is None:
        raise ValueError(
            "A layout needs a mesh before it can place a tensor. Received: "
            f"{tensor_layout}"
        )
    return placement.to_placement(tensor_layout)
