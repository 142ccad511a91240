"""Distribution on JAX: a variable is a `jax.Array` with a `NamedSharding`.

GSPMD inserts the collectives. Keras's own JAX module does most of the work.
The functions are those of `docs/backend_interface.md`.
"""

import copy
import functools
import os
import re

import jax
import numpy as np
from jax._src import core
from keras.src.backend import config
from keras.src.backend.jax import distribution_lib as keras_lib
from keras.src.distribution.distribution_lib import distribution

from keras_tp.backend import hlo_collectives
from keras_tp.backend.jax import arrays
from keras_tp.backend.jax import batches
from keras_tp.backend.jax import collective_counter
from keras_tp.backend.jax import gathers
from keras_tp.backend.jax import hooks
from keras_tp.backend.jax import parts
from keras_tp.backend.jax import processes
from keras_tp.backend.jax import storage
from keras_tp.backend.processes import commands
from keras_tp.backend.processes import engine_commands
from keras_tp.backend.processes import supervisor

# XLA aborts a CPU collective whose participants do not arrive in time. With
# more virtual devices than cores, they arrive late. XLA ends a process whose
# flags it does not know, and jaxlib 0.7 does not know these.
_COLLECTIVE_TIMEOUT_S = 600
_FIRST_WITH_TIMEOUTS = (0, 8)
# JAX reads it when it is imported, and then ignores the flag of XLA.
_JAX_CPU_DEVICES = "JAX_NUM_CPU_DEVICES"
_XLA_CPU_FLAGS = {
    "xla_cpu_collective_call_terminate_timeout_seconds": _COLLECTIVE_TIMEOUT_S,
    "xla_cpu_collective_call_warn_stuck_timeout_seconds": _COLLECTIVE_TIMEOUT_S,
}


def list_devices(device_type=None):
    """Returns the names of the devices of all processes.

    Args:
        device_type: String, `"cpu"`, `"gpu"` or `"tpu"`. Defaults to the
            accelerator if there is one, else `"cpu"`.
    """
    try:
        return keras_lib.list_devices(device_type)
    except RuntimeError as e:
        raise ValueError(
            f"JAX has no devices of type {device_type!r} here. "
            f"Received: device_type={device_type!r}"
        ) from e


def get_device_count(device_type=None):
    """Returns the number of devices of all processes."""
    return len(list_devices(device_type))


def initialize(job_addresses, num_processes, process_id):
    """Joins the other processes through `jax.distributed`.

    Args:
        job_addresses: String, comma-separated `host:port`; the address of
            process 0 is enough. `None` if JAX can detect it from a scheduler.
        num_processes: Int, number of processes; `None` likewise.
        process_id: Int, index of this process; `None` likewise.
    """
    processes.start(job_addresses, num_processes, process_id)


def num_processes():
    """Returns the number of processes."""
    return processes.world_size()


def process_id():
    """Returns the index of this process."""
    return processes.index()


def from_first_process(value):
    """Returns the value of process 0, in every process.

    A collective if there are several processes.

    Args:
        value: A value that `messages.encode` accepts; ignored in the other
            processes.
    """
    return processes.from_first(value)


def meet(what):
    """Waits until every process has called this function.

    A collective. One process alone does not wait.

    Args:
        what: String that names the call, for the error.

    Raises:
        RuntimeError: if a process does not arrive in time; names the process.
    """
    processes.meet(what)


def collective_library(device_type):
    """Returns the name of the library that moves tensors between devices.

    Always `"jax"`: a user cannot choose the library that JAX uses inside.
    """
    return "jax"


def activate():
    """Checks the settings and agrees on one seed with the other processes.

    A collective. Called before the hooks are installed.

    Raises:
        ValueError: in Keras's NNX mode, or if a setting of JAX makes random
            numbers depend on the number of devices.
    """
    if config.is_nnx_enabled():
        raise ValueError(
            "keras_tp does not support Keras's NNX mode. Unset "
            "KERAS_NNX_ENABLED. Received: keras.config.is_nnx_enabled()=True"
        )
    if not jax.config.jax_threefry_partitionable:
        raise ValueError(
            "With jax_threefry_partitionable=False, random numbers (initial "
            "values, dropout masks) depend on the number of devices. Leave it "
            "at its default, True. Received: "
            "jax.config.jax_threefry_partitionable=False"
        )
    processes.agree_on_seed()


def hook_table():
    """Returns the rows of JAX's hook table."""
    return hooks.TABLE


def is_tracing():
    """Returns whether JAX is tracing, as under `jit` or `grad`."""
    return not core.trace_state_clean()


def records_gradients():
    """Returns whether operations are recorded, as by a tape. JAX has none."""
    return False


def splits_unevenly():
    """Returns whether a dim may be split that a mesh axis does not divide.

    JAX stores such a dim with padding.
    """
    return True


def splits_in_blocks():
    """Returns whether each block of a dim may be split.

    JAX stores the blocks along a dim of their own.
    """
    return True


def distribute_tensor(tensor, layout):
    """Changes the layout of a tensor, eagerly or while tracing.

    Args:
        tensor: `jax.Array` or tracer.
        layout: `TensorLayout` or `jax.sharding.Sharding`.
    """
    if gathers.is_one(layout) and isinstance(tensor, jax.core.Tracer):
        whole = gathers.gather(tensor, layout.gathered_from, layout)
        if whole is not None:
            return whole
    return keras_lib.distribute_tensor(tensor, layout)


def distribute_data_input(per_process_batch, layout, batch_dim_name):
    """Puts a batch on the devices.

    Args:
        per_process_batch: Array, the global batch, the same in every process.
            Under a distribution with `auto_shard_dataset=False`, this
            process's part of it; the call is then a collective.
        layout: `TensorLayout` or `jax.sharding.Sharding`. A batch that it
            cannot split evenly is replicated, and so is a sparse one.
        batch_dim_name: String, mesh axis that splits the batch.

    Returns:
        The global batch as a `jax.Array`.
    """
    if per_process_batch is None:
        return None
    if processes.world_size() > 1 and distribution() is not None:
        return batches.place_given(per_process_batch, distribution())
    if batches.is_sparse(per_process_batch):
        return batches.replicate_sparse(per_process_batch, layout)
    return keras_lib.distribute_data_input(
        per_process_batch,
        batches.fitting_sharding(per_process_batch.shape, layout),
        batch_dim_name,
    )


def relayout_variable(variable, layout):
    """Moves a variable to another layout; its value stays the same.

    Args:
        variable: A Keras variable. At most its old and its new shards are in
            memory together.
        layout: `TensorLayout`, or `None` for a plain array on one device.
    """
    value = variable._value
    if layout is None:
        # Through the host: a plain array must not be committed to a device.
        moved = jax.numpy.asarray(np.asarray(variable.value))
    elif storage.is_stored(variable, layout):
        moved = storage.moved(variable, layout)
    else:
        moved = arrays.place(value, layout.backend_layout)
    moved.block_until_ready()
    variable._layout = layout
    variable._value = moved


def variable_bytes_by_device(variable):
    """Returns a dict of device name to bytes of a variable on that device.

    Read from the live array. A collective if several processes hold it.
    """
    held = {}
    for shard in variable._value.addressable_shards:
        name = f"{shard.device.platform}:{shard.device.id}"
        held[name] = held.get(name, 0) + shard.data.nbytes
    if arrays.is_spread(variable._value):
        for others in processes.gather(held, "the bytes of a variable"):
            held.update(others)
    return dict(sorted(held.items()))


def peak_memory():
    """Returns a dict of accelerator to the most bytes in use on it so far.

    Of the devices of this process; empty where there are CPU devices only.
    """
    found = {}
    for device in jax.local_devices():
        statistics = device.memory_stats() or {}
        if "peak_bytes_in_use" in statistics:
            name = f"{device.platform}:{device.id}"
            found[name] = statistics["peak_bytes_in_use"]
    return found


def variable_parts(variable):
    """Returns the parts of a variable on the devices of this process."""
    return parts.held(variable)


def assign_parts(variable, part_of):
    """Sets a variable; each device takes its part of the new value."""
    parts.assign(variable, part_of)


def variable_axes(variable):
    """Returns the mesh axes that split each dim of a variable's live array.

    Returns:
        Tuple with `None`, a mesh axis or a tuple of mesh axes for each dim;
        `None` if the variable is a plain array on one device.
    """
    sharding = variable._value.sharding
    if not isinstance(sharding, jax.sharding.NamedSharding):
        return None
    axes = tuple(sharding.spec)
    axes += (None,) * (variable._value.ndim - len(axes))
    dim = storage.block_dim(variable)
    # The dim in front of the split one counts the blocks.
    return axes if dim is None else axes[:dim] + axes[dim + 1 :]


def why_gathered(variable, layer):
    """Returns why a layer gathers a split variable to compute with it.

    Args:
        variable: A split Keras variable of the layer.
        layer: A Keras layer.

    Returns:
        String, empty if each device computes with its shard of the variable.
    """
    # XLA splits the computation of every layer like its variables.
    return ""


def count_collectives(model, x, y=None):
    """Counts the collectives of the compiled step of a model.

    Args:
        model: A Keras model whose distribution is the current one.
        x: Inputs of one batch.
        y: Targets of the batch. Defaults to `None`: the forward pass.

    Returns:
        Dict of the collective's name to `(count, bytes)`.
    """
    return hlo_collectives.count(
        collective_counter.compile_step(model, x, y).as_text()
    )


def launch(plan, argv):
    """Runs a script on a number of devices, in this process or in several.

    Args:
        plan: `supervisor.Plan`. Without accelerators, JAX makes virtual CPUs.
        argv: List of strings: the script and its arguments.
    """
    plan = plan.with_processes()
    if plan.engine is not None:
        engine_commands.show(plan, argv, _device_variables)
        return
    if plan.processes > 1 or plan.dry_run:
        supervisor.launch(
            plan, argv, functools.partial(_process_variables, plan)
        )
        return
    os.environ["XLA_FLAGS"] = _xla_flags(
        os.environ.get("XLA_FLAGS", ""), plan.devices
    )
    jax.config.update("jax_num_cpu_devices", plan.devices)
    available = list_devices()
    if len(available) < plan.devices:
        raise ValueError(
            f"The run needs {plan.devices} devices, but JAX finds "
            f"{len(available)}: {available}. To use virtual CPU devices "
            "instead, set JAX_PLATFORMS=cpu."
        )
    commands.run_script(argv, plan.devices)


def how_to_launch(device_count):
    """Returns a sentence on how to run this script on several devices.

    Args:
        device_count: Int, number of devices.
    """
    if commands.in_notebook():
        variables = _device_variables(device_count)
        if jax.default_backend() != "cpu":
            variables["JAX_PLATFORMS"] = "cpu"
        return commands.before_import(device_count, variables)
    command = commands.launch(device_count)
    return f"To run on {device_count} devices: `{command}`."


def _device_variables(device_count):
    """Returns the environment variables that make virtual devices."""
    flags = os.environ.get("XLA_FLAGS", "")
    found = {"XLA_FLAGS": _xla_flags(flags, device_count)}
    if _JAX_CPU_DEVICES in os.environ:
        found[_JAX_CPU_DEVICES] = str(device_count)
    return found


def _process_variables(plan, device_count, local):
    """Returns the environment variables of one process of a host."""
    found = _device_variables(device_count)
    if plan.processes_here > 1:
        # The processes of a host share its accelerators too.
        own = range(local * device_count, (local + 1) * device_count)
        found["JAX_LOCAL_DEVICE_IDS"] = ",".join(map(str, own))
    return found


def _xla_flags(flags, device_count):
    """Returns `XLA_FLAGS` with the device count, and timeouts if unset."""
    name = "xla_force_host_platform_device_count"
    kept = [f for f in flags.split() if not re.match(rf"--{name}\b", f)]
    kept.append(f"--{name}={device_count}")
    are_known = jax.__version_info__[:2] >= _FIRST_WITH_TIMEOUTS
    for timeout, seconds in _XLA_CPU_FLAGS.items() if are_known else ():
        if timeout not in flags:
            kept.append(f"--{timeout}={seconds}")
    return " ".join(kept)


def _to_backend_device(device_name):
    return keras_lib._to_backend_device(device_name)


def _to_backend_mesh(device_mesh):
    mesh = keras_lib._to_backend_mesh(device_mesh)
    count = processes.world_size()
    if count == 1:
        return mesh
    if mesh.size == 1:
        # Each process has a copy, on its own first device.
        own = jax.local_devices(backend=mesh.devices.item().platform)[:1]
        return jax.sharding.Mesh(
            np.reshape(own, mesh.devices.shape), mesh.axis_names
        )
    owners = {device.process_index for device in mesh.devices.flatten()}
    if len(owners) < count:
        raise ValueError(
            f"The mesh must hold a device of each of the {count} processes of "
            "this run. It holds no device of process(es) "
            f"{sorted(set(range(count)) - owners)}. Use a mesh of all devices, "
            "or a mesh of one device, which keeps a copy in each process. "
            "Received: "
            f"devices={[str(d) for d in device_mesh.devices.flatten()]}"
        )
    return mesh


def _to_backend_layout(tensor_layout):
    if getattr(tensor_layout, "blocks", None):
        stored = copy.copy(tensor_layout)
        stored._axes = tensor_layout.stored_axes
        stored.blocks = {}
        tensor_layout = stored
    return keras_lib._to_backend_layout(tensor_layout)
