"""Creates and reads arrays that span several processes."""

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding

from keras_tp.backend import host_memory
from keras_tp.backend.jax import processes


def is_spread(value):
    """Returns whether devices of other processes hold (parts of) a value."""
    return isinstance(value, jax.Array) and not value.is_fully_addressable


def is_distributed(model):
    """Returns whether several processes hold the variables of a model."""
    return any(is_spread(variable._value) for variable in model.variables)


def place(value, sharding):
    """Returns an array with a sharding, eagerly.

    Args:
        value: Array. If the sharding spans several processes and the array
            does not, it has to be the same in every process. The processes
            compare it; the call is then a collective.
        sharding: `jax.sharding.Sharding`.
    """
    if sharding.is_fully_addressable or is_spread(value):
        if sharding.is_fully_addressable and is_spread(value):
            value = np.asarray(value)
        return jax.device_put(value, sharding)
    value = np.asarray(value)
    processes.same_array(value)
    return from_whole(value, sharding)


def from_whole(value, sharding):
    """Returns a sharded array of a value that every process holds whole."""
    if sharding.is_fully_addressable:
        return jax.device_put(value, sharding)
    value = np.asarray(value)

    def part(position):
        held = value[position]
        if held.size == value.size:
            return held
        # A CPU device would use the memory of rows, and keep the whole value.
        copy = host_memory.zeros(held.shape, held.dtype)
        copy[...] = held
        return copy

    return jax.make_array_from_callback(value.shape, sharding, part)


def zeros(shape, dtype, sharding):
    """Returns a sharded array of zeros; each process makes its parts."""

    def part(position):
        limits = [p.indices(size) for p, size in zip(position, shape)]
        return host_memory.zeros([b - a for a, b, _ in limits], dtype)

    return jax.make_array_from_callback(shape, sharding, part)


def hook_value(original):
    """Gathers the whole value of an array, for numpy and for saving."""

    def _value(self):
        if _needs_communication(self):
            processes.meet("Converting a tensor to numpy, as saving does,")
            return multihost_utils.process_allgather(self, tiled=True)
        return original.fget(self)

    return property(_value)


def distribute_tensor(original, tensor, layout):
    """Makes one array of a value that every process has.

    On a mesh of one device, an array gets the mesh's sharding. Keras would
    leave it as it is, and warn of variables with a mesh and without.
    """
    sharding = getattr(layout, "backend_layout", layout)
    if isinstance(tensor, jax.core.Tracer) or not isinstance(
        sharding, jax.sharding.Sharding
    ):
        return original(tensor, layout)
    if isinstance(tensor, jax.Array) and tensor.sharding == sharding:
        return tensor
    if processes.world_size() == 1:
        if isinstance(sharding, NamedSharding) and sharding.mesh.size == 1:
            return jax.device_put(tensor, sharding)
        return original(tensor, layout)
    if is_spread(tensor) and tensor.sharding.is_equivalent_to(
        sharding, tensor.ndim
    ):
        return tensor
    return place(tensor, sharding)


def _needs_communication(array):
    """Returns whether this process lacks a part of an array."""
    if array.is_fully_addressable or array.is_fully_replicated:
        return False
    sharding, shape = array.sharding, array.shape
    held = sharding.addressable_devices_indices_map(shape).values()
    whole = sharding.devices_indices_map(shape).values()
    return set(map(str, held)) != set(map(str, whole))
