"""Distribution on TensorFlow: a variable is a `dtensor.DVariable`.

DTensor's SPMD expansion inserts the collectives. The functions are those of
`docs/backend_interface.md`.
"""

import os
import sys

import tensorflow as tf
from keras.src.backend.tensorflow import distribution_lib as keras_lib
from keras.src.distribution.distribution_lib import distribution
from tensorflow.experimental import dtensor
from tensorflow.python.eager import record

from keras_tp.backend.hooks import backend_row
from keras_tp.backend.processes import commands
from keras_tp.backend.processes import engine_commands
from keras_tp.backend.processes import engines
from keras_tp.backend.processes import supervisor
from keras_tp.backend.tensorflow import batches
from keras_tp.backend.tensorflow import boundary
from keras_tp.backend.tensorflow import collective_counter
from keras_tp.backend.tensorflow import devices
from keras_tp.backend.tensorflow import hooks
from keras_tp.backend.tensorflow import parts
from keras_tp.backend.tensorflow import placement
from keras_tp.backend.tensorflow import processes
from keras_tp.backend.tensorflow import selfcheck
from keras_tp.backend.tensorflow import variables
from keras_tp.backend.tensorflow.ops import conv

# TensorFlow reads both settings once, when it first runs an operation.
selfcheck.disable_what_corrupts()
devices.make_virtual()


def list_devices(device_type=None):
    """Returns the names of the devices of all processes."""
    devices.check_virtual()
    if num_processes() > 1:
        # Listed process by process, in the order of DTensor's meshes.
        kind = (device_type or processes.kind()).upper()
        count = dtensor.num_global_devices(kind)
        return [f"{kind.lower()}:{index}" for index in range(count)]
    found = keras_lib.list_devices(device_type)
    if not found:
        raise ValueError(
            f"TensorFlow has no devices of type {device_type!r} here. "
            f"Received: device_type={device_type!r}"
        )
    return found


def get_device_count(device_type=None):
    """Returns the number of devices of all processes."""
    return len(list_devices(device_type))


def initialize(job_addresses, num_processes, process_id):
    """Joins the other processes as a client of DTensor.

    DTensor's own environment variables win over those of an engine.
    """
    if not os.environ.get("DTENSOR_JOBS"):
        job_addresses, num_processes, process_id = engines.fill(
            job_addresses, num_processes, process_id
        )
    processes.start(job_addresses, num_processes, process_id)


def num_processes():
    """Returns the number of processes."""
    return processes.world_size()


def process_id():
    """Returns the index of this process."""
    return processes.index()


def from_first_process(value):
    """Returns the value of process 0, in every process."""
    return processes.from_first(value)


def meet(what):
    """Waits until every process has called this function."""
    processes.meet(what)


def collective_library(device_type):
    """Returns `"tensorflow"`: a user cannot choose the library."""
    return "tensorflow"


def activate():
    """Raises if TensorFlow would train wrongly; agrees on one seed.

    The check runs only if there is one process.
    """
    selfcheck.disable_what_corrupts()
    if num_processes() == 1:
        selfcheck.check(list_devices())
    processes.agree_on_seed()


def hook_table():
    """Returns the rows of TensorFlow's hook table."""
    return [backend_row(sys.modules[__name__]), *hooks.TABLE]


def is_tracing():
    """Returns whether operations go to a graph instead of the devices."""
    return not tf.executing_eagerly()


def records_gradients():
    """Returns whether a `GradientTape` records operations."""
    return tf.executing_eagerly() and record.could_possibly_record()


def splits_in_blocks():
    """Returns whether each block of a dim may be split. DTensor cannot."""
    return False


def splits_unevenly():
    """Returns whether a dim may be split that a mesh axis does not divide.

    All parts of a DTensor of TensorFlow have one size.
    """
    return False


def distribute_tensor(tensor, layout):
    """Changes the layout of a tensor, eagerly or while tracing.

    Shape inference runs outside of any mesh: there a symbolic tensor is
    returned as it is.
    """
    if not tf.executing_eagerly() and placement.current_mesh() is None:
        return tensor
    return placement.place(tensor, getattr(layout, "backend_layout", layout))


def distribute_data_input(per_process_batch, layout, batch_dim_name):
    """Puts a batch on the devices as a DTensor; a sparse one becomes dense."""
    if num_processes() > 1 and distribution() is not None:
        return batches.place(per_process_batch, distribution())
    mesh = getattr(layout, "backend_layout", layout).mesh
    return boundary.place_batch(per_process_batch, mesh, batch_dim_name)


def relayout_variable(variable, layout):
    """Moves a variable to another layout; its value stays the same.

    With several processes, each device gathers the whole value first.
    """
    variables.relayout(variable, layout)


def peak_memory():
    """Returns a dict of accelerator to the most bytes in use on it so far."""
    count = len(tf.config.list_logical_devices("GPU"))
    memory_of = tf.config.experimental.get_memory_info
    return {f"gpu:{n}": memory_of(f"GPU:{n}")["peak"] for n in range(count)}


def variable_parts(variable):
    """Returns the parts of a variable on the devices of this process."""
    return parts.held(variable)


def assign_parts(variable, part_of):
    """Sets a variable; each device takes its part of the new value."""
    parts.assign(variable, part_of)


def variable_axes(variable):
    """Returns the mesh axis that splits each dim of the live tensor."""
    value = variable._value
    if not isinstance(value, dtensor.DVariable):
        return None
    specs = dtensor.fetch_layout(value.read_value()).sharding_specs
    return tuple(None if s == dtensor.UNSHARDED else s for s in specs)


def variable_bytes_by_device(variable):
    """Returns a dict of device name to the bytes of the live tensor there."""
    value = variable._value
    if not isinstance(value, dtensor.DVariable):
        device = tf.DeviceSpec.from_string(value.device)
        name = f"{device.device_type or 'CPU'}:{device.device_index or 0}"
        return {name.lower(): value.read_value().numpy().nbytes}
    mesh = value.layout.mesh
    names = dict(zip(mesh.local_device_ids(), mesh.local_devices()))
    held = {}
    for device_id, _, part in placement.local_parts(value):
        device = tf.DeviceSpec.from_string(names[device_id])
        index = device.device_index if num_processes() == 1 else device_id
        held[f"{device.device_type}:{index}".lower()] = part.nbytes
    if mesh.num_local_devices() < mesh.size:
        for others in processes.gather(held, "the bytes of a variable"):
            held.update(others)
    return dict(sorted(held.items()))


def why_gathered(variable, layer):
    """Returns why a layer gathers a split variable: for some convolutions."""
    return conv.why_gathered(variable, layer)


def count_collectives(model, x, y=None):
    """Counts the collectives that one executed step of a model contains."""
    return collective_counter.count_step(model, x, y)


def launch(plan, argv):
    """Runs a script on a number of devices, in this process or in several.

    If TensorFlow finds no accelerator, virtual CPU devices are made.
    """
    plan = plan.with_processes()
    if plan.engine is not None:
        engine_commands.show(plan, argv, _process_variables)
        return
    if plan.processes > 1 or plan.dry_run:
        supervisor.launch(plan, argv, _process_variables)
        return
    os.environ.update(_process_variables(plan.devices, 0))
    devices.make_virtual()
    available = list_devices()
    if len(available) < plan.devices:
        raise ValueError(
            f"The run needs {plan.devices} devices, but TensorFlow finds "
            f"{len(available)}: {available}. To use virtual CPU devices "
            "instead, hide the others: set CUDA_VISIBLE_DEVICES=-1."
        )
    commands.run_script(argv, plan.devices)


def how_to_launch(device_count):
    """Returns a sentence on how to run this script on several devices."""
    if commands.in_notebook():
        variables = _process_variables(device_count, 0)
        if tf.config.list_physical_devices("GPU"):
            variables["CUDA_VISIBLE_DEVICES"] = "-1"
        return commands.before_import(device_count, variables)
    command = commands.launch(device_count)
    return f"To run on {device_count} devices: `{command}`."


def _process_variables(device_count, local=0):
    """Returns the environment variables of a process of this host."""
    return {devices.CPU_DEVICES: str(device_count)}


def _to_backend_device(device_name):
    return tf.DeviceSpec.from_string(f"/device:{device_name.upper()}")


def _to_backend_mesh(device_mesh):
    names = [str(device) for device in device_mesh.devices.flatten()]
    dims = list(zip(device_mesh.axis_names, device_mesh.shape))
    if num_processes() > 1:
        kind = names[0].split(":")[0].upper()
        if names != list_devices(kind):
            raise ValueError(
                "With several processes, a DTensor mesh must hold all devices "
                "in their order. To bring a model back to one device, save it "
                "and load it in a single process. All devices: "
                f"{list_devices(kind)}. Received: devices={names}"
            )
        mesh = dtensor.create_distributed_mesh(dims, device_type=kind)
    else:
        names = [name.upper() for name in names]
        mesh = dtensor.create_mesh(dims, devices=names)
    placement.note_mesh(mesh, device_mesh)
    return mesh


def _to_backend_layout(tensor_layout):
    if tensor_layout.device_mesh is None:
        raise ValueError(
            "A layout needs a device mesh before it can be used. Received: "
            f"{tensor_layout}"
        )
    several = [axis for axis in tensor_layout.axes if isinstance(axis, tuple)]
    if several:
        raise ValueError(
            "DTensor cannot split one dim over several mesh axes. Join these "
            "axes into one axis of the mesh, or split the dim over one of "
            f"them. Received: axes={tensor_layout.axes}"
        )
    specs = [axis or dtensor.UNSHARDED for axis in tensor_layout.axes]
    return dtensor.Layout(specs, tensor_layout.device_mesh.backend_mesh)
