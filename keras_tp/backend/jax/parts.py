"""Parts of variables, read and set in the host's memory for checkpoints."""

import jax
import numpy as np

from keras_tp.backend.jax import arrays
from keras_tp.backend.jax import processes
from keras_tp.backend.jax import storage


def held(variable):
    """Returns the parts on this process's devices, each once.

    See `distribution_lib.variable_parts`.
    """
    value = variable._value
    is_here = arrays.is_spread(value) or processes.is_first()
    found = {}
    for shard in value.addressable_shards:
        is_written, _ = found.get(str(shard.index), (False, None))
        is_written |= is_here and shard.replica_id == 0
        found[str(shard.index)] = is_written, shard
    return [
        (
            _ranges(variable, shard.index),
            is_written,
            lambda shard=shard: _own_part(variable, shard),
        )
        for is_written, shard in found.values()
    ]


def assign(variable, part_of):
    """Sets the value of a variable; see `distribution_lib.assign_parts`."""
    if variable._layout is None:
        whole = tuple([(0, size)] for size in variable.shape)
        variable._value = jax.numpy.asarray(part_of(whole))
        return
    old, made = variable._value, {}

    def stored_part(index):
        key = str(index)
        if key not in made:
            made[key] = _in_storage(
                part_of(_ranges(variable, index)), index, old.shape
            )
        return made[key]

    # Without waiting, many older and newer values would be in memory together.
    variable._value = jax.block_until_ready(
        jax.make_array_from_callback(old.shape, old.sharding, stored_part)
    )


def _limits(index, shape):
    return [part.indices(size)[:2] for part, size in zip(index, shape)]


def _ranges(variable, index):
    """Returns the ranges of a stored part, without zeros at its end."""
    shape, dim = tuple(variable.shape), storage.block_dim(variable)
    limits = _limits(index, variable._value.shape)
    if dim is None or len(limits) == len(shape):
        return tuple(
            [(min(start, size), min(stop, size))]
            for (start, stop), size in zip(limits, shape)
        )
    (first, last), (start, stop) = limits[dim : dim + 2]
    size = variable._value.shape[dim + 1]
    blocks = [
        (block * size + start, block * size + stop)
        for block in range(first, last)
    ]
    others = [[part] for part in (*limits[:dim], *limits[dim + 2 :])]
    return tuple([*others[:dim], blocks, *others[dim:]])


def _own_part(variable, shard):
    """Returns the array of a part in the variable's shape."""
    part, sizes = np.asarray(shard.data), []
    for own in _ranges(variable, shard.index):
        sizes.append(sum(stop - start for start, stop in own))
    if part.ndim != len(sizes):
        return part.reshape(sizes)
    return part[tuple(map(slice, sizes))]


def _in_storage(part, index, stored_shape):
    """Returns a part in the shape in which a device stores it."""
    sizes = [stop - start for start, stop in _limits(index, stored_shape)]
    if part.ndim != len(sizes):
        return part.reshape(sizes)
    ends = [(0, size - own) for size, own in zip(sizes, part.shape)]
    return np.pad(part, ends) if any(map(any, ends)) else part
