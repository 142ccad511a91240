"""Collectives with gradients; `backend/communication.py` documents them.

Processes on CPUs use no reduce-scatter: with jaxlib 0.10, its sums of large
parts (16 MiB) are wrong on one device, without an error
(https://github.com/jax-ml/jax/issues/40830).
"""

import jax
import jax.numpy as jnp

from keras_tp.backend.jax import processes


def all_reduce(x, device_mesh, axis, source=None):
    """Adds up `x` over an axis, or only the part of device `source`."""
    return _map(
        lambda part: jax.lax.psum(_only(part, axis, source), axis),
        x,
        device_mesh,
        axis,
    )


def all_gather(x, device_mesh, axis):
    """Concatenates `x` over an axis."""
    return _map(lambda part: _all_gather(part, axis), x, device_mesh, axis)


def reduce_scatter(x, device_mesh, axis, source=None):
    """Splits the result of `all_reduce` over the axis."""
    return _map(
        lambda part: _reduce_scatter(_only(part, axis, source), axis),
        x,
        device_mesh,
        axis,
    )


def _map(function, x, device_mesh, axis):
    """Runs a function on the shard of each device of an axis."""
    spec = jax.sharding.PartitionSpec(axis)
    return jax.shard_map(
        function,
        mesh=device_mesh.backend_mesh,
        in_specs=spec,
        out_specs=spec,
        axis_names={axis},
    )(x)


def _all_gather(part, axis):
    if processes.are_on_cpus():
        # The gradient would be a reduce-scatter.
        size = part.shape[1]
        whole = jnp.concatenate(
            [jnp.zeros_like(part)] * jax.lax.axis_size(axis), 1
        )
        first = jax.lax.axis_index(axis) * size
        whole = jax.lax.dynamic_update_slice_in_dim(whole, part, first, 1)
        return jax.lax.psum(whole, axis)
    return jax.lax.all_gather(part, axis, axis=1, tiled=True)


def _reduce_scatter(part, axis):
    if processes.are_on_cpus():
        size = part.shape[1] // jax.lax.axis_size(axis)
        first = jax.lax.axis_index(axis) * size
        whole = jax.lax.psum(part, axis)
        return jax.lax.dynamic_slice_in_dim(whole, first, size, 1)
    return jax.lax.psum_scatter(part, axis, scatter_dimension=1, tiled=True)


def _only(part, axis, source):
    if source is None:
        return part
    is_source = jax.lax.axis_index(axis) == source
    return jnp.where(is_source, part, jnp.zeros_like(part))
