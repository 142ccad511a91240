"""Collectives with gradients; `backend/communication.py` documents them."""

import jax
import jax.numpy as jnp

from keras_tp.backend.jax import in_shard_map


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
    return _map(
        lambda part: in_shard_map.all_gather(part, axis, 1),
        x,
        device_mesh,
        axis,
    )


def reduce_scatter(x, device_mesh, axis, source=None):
    """Splits the result of `all_reduce` over the axis."""
    return _map(
        lambda part: in_shard_map.reduce_scatter(
            _only(part, axis, source), axis, 1
        ),
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


def _only(part, axis, source):
    if source is None:
        return part
    is_source = jax.lax.axis_index(axis) == source
    return jnp.where(is_source, part, jnp.zeros_like(part))
