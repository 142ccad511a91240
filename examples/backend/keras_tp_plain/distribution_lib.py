"""Distribution on plain JAX: a variable is an array with a `NamedSharding`.

XLA inserts the collectives, and Keras's own module for JAX places values. This
backend runs in one process, and splits a dim only into equal parts.
"""

import os

import jax
import numpy as np
from jax._src import core
from keras.src.backend.jax import distribution_lib as keras_lib

from keras_tp.backend import hlo_collectives
from keras_tp.backend.hooks import Hook
from keras_tp.backend.jax import collective_counter
from keras_tp.backend.jax import pooling
from keras_tp.backend.processes import callbacks
from keras_tp.backend.processes import commands
from keras_tp.backend.saving import one_writer

_COUNT = "--xla_force_host_platform_device_count"


# The devices and the processes.


def list_devices(device_type=None):
    """Returns the names of the devices."""
    try:
        return keras_lib.list_devices(device_type)
    except RuntimeError as e:
        raise ValueError(f"JAX has no devices of type {device_type!r}") from e


def get_device_count(device_type=None):
    """Returns the number of devices."""
    return len(list_devices(device_type))


def initialize(job_addresses, num_processes, process_id):
    """Joins the other processes: there are none."""
    if num_processes not in (None, 1):
        raise ValueError(
            "This backend runs in one process. Received: "
            f"num_processes={num_processes}"
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
    """Waits until every process is here."""


def collective_library(device_type):
    """Returns the name of the library that moves tensors."""
    return "jax"


def launch(plan, argv):
    """Runs a script on virtual devices of this process."""
    if plan.with_processes().processes > 1:
        raise ValueError("This backend runs in one process.")
    flags = os.environ.get("XLA_FLAGS", "")
    os.environ["XLA_FLAGS"] = f"{flags} {_COUNT}={plan.devices}"
    commands.run_script(argv)


def how_to_launch(device_count):
    """Returns the sentence that says how to run on several devices."""
    return (
        f"To run on {device_count} devices: `{commands.launch(device_count)}`."
    )


# The hooks.


def activate():
    """Prepares a run, before the hooks are installed."""


def hook_table():
    """Returns what is replaced in Keras, and why."""
    batches = Hook(
        "keras.src.backend.jax.distribution_lib",
        "distribute_data_input",
        lambda original: distribute_data_input,
        "a batch that does not divide is whole on each device",
    )
    windows = Hook(
        "keras.src.backend.jax.nn",
        ("max_pool", "adaptive_max_pool"),
        pooling.hook_max_pool,
        "gradients are correct where pooling windows cross two devices",
    )
    files = one_writer.table(is_distributed=lambda model: False)
    return [batches, *callbacks.table(), windows, *files]


# What it can split, and what is going on.


def splits_unevenly():
    """Returns whether parts may have different sizes."""
    return False


def splits_in_blocks():
    """Returns whether each block of a dim may be split."""
    return False


def is_tracing():
    """Returns whether JAX is tracing."""
    return not core.trace_state_clean()


def records_gradients():
    """Returns whether a tape records operations. JAX has none."""
    return False


# Tensors and variables.


def distribute_tensor(tensor, layout):
    """Changes the layout of a tensor, eagerly or while tracing."""
    return keras_lib.distribute_tensor(tensor, layout)


def distribute_data_input(per_process_batch, layout, batch_dim_name):
    """Puts a batch on the devices, whole if it does not divide."""
    if per_process_batch is None:
        return None
    sharding = getattr(layout, "backend_layout", layout)
    try:
        sharding.shard_shape(per_process_batch.shape)
    except ValueError:
        nothing = jax.sharding.PartitionSpec()
        sharding = jax.sharding.NamedSharding(sharding.mesh, nothing)
    return jax.device_put(per_process_batch, sharding)


def relayout_variable(variable, layout):
    """Moves a variable to another layout; `None` for a plain array."""
    if layout is None:
        variable._value = jax.numpy.asarray(np.asarray(variable._value))
    else:
        variable._value = jax.device_put(variable._value, layout.backend_layout)
    variable._layout = layout


def variable_axes(variable):
    """Returns the mesh axes that split each dim, of the live array."""
    sharding = variable._value.sharding
    if not isinstance(sharding, jax.sharding.NamedSharding):
        return None
    axes = tuple(sharding.spec)
    return axes + (None,) * (variable._value.ndim - len(axes))


def variable_bytes_by_device(variable):
    """Returns a dict of device name to bytes, of the live array."""
    return {
        f"{shard.device.platform}:{shard.device.id}": shard.data.nbytes
        for shard in variable._value.addressable_shards
    }


def variable_parts(variable):
    """Returns ranges, whether it is written here, and a reader of each part."""
    parts = {}
    for shard in variable._value.addressable_shards:
        ranges = _ranges(shard.index, variable.shape)
        parts.setdefault(
            str(ranges),
            (ranges, True, lambda shard=shard: np.asarray(shard.data)),
        )
    return list(parts.values())


def assign_parts(variable, part_of):
    """Sets a variable; each device takes its part."""
    if variable._layout is None:
        whole = _ranges((slice(None),) * len(variable.shape), variable.shape)
        variable._value = jax.numpy.asarray(part_of(whole))
        return
    variable._value = jax.make_array_from_callback(
        tuple(variable.shape),
        variable._value.sharding,
        lambda index: part_of(_ranges(index, variable.shape)),
    )


def _ranges(index, shape):
    """Returns a list of one start and end for each dim."""
    return tuple([part.indices(size)[:2]] for part, size in zip(index, shape))


# What is reported.


def why_gathered(variable, layer):
    """Returns why a layer gathers a variable: XLA splits every layer."""
    return ""


def peak_memory():
    """Returns the most bytes in use of each accelerator."""
    statistics = {d: d.memory_stats() for d in jax.local_devices()}
    return {
        f"{device.platform}:{device.id}": found["peak_bytes_in_use"]
        for device, found in statistics.items()
        if found
    }


def count_collectives(model, x, y=None):
    """Counts the collectives of the compiled step."""
    program = collective_counter.compile_step(model, x, y)
    return hlo_collectives.count(program.as_text())


# The framework's objects.


def _to_backend_device(device_name):
    return keras_lib._to_backend_device(device_name)


def _to_backend_mesh(device_mesh):
    return keras_lib._to_backend_mesh(device_mesh)


def _to_backend_layout(tensor_layout):
    return keras_lib._to_backend_layout(tensor_layout)
