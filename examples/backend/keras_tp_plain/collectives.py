"""Collectives with gradients; `keras_tp.backend.communication` has the docs."""

import jax
import jax.numpy as jnp


def all_reduce(x, device_mesh, axis, source=None):
    """Adds up `x` over an axis, or only the part of device `source`."""

    def on_each(part):
        return jax.lax.psum(_only(part, axis, source), axis)

    return _map(on_each, x, device_mesh, axis)


def all_gather(x, device_mesh, axis):
    """Concatenates `x` over an axis."""

    def on_each(part):
        return jax.lax.all_gather(part, axis, axis=1, tiled=True)

    return _map(on_each, x, device_mesh, axis)


def reduce_scatter(x, device_mesh, axis, source=None):
    """Splits the result of `all_reduce` over the axis."""

    def on_each(part):
        part = _only(part, axis, source)
        return jax.lax.psum_scatter(part, axis, scatter_dimension=1, tiled=True)

    return _map(on_each, x, device_mesh, axis)


def _map(function, x, device_mesh, axis):
    """Runs a function on the part of each device; dim 0 is the devices."""
    spec = jax.sharding.PartitionSpec(axis)
    return jax.shard_map(
        function,
        mesh=device_mesh.backend_mesh,
        in_specs=spec,
        out_specs=spec,
    )(x)


def _only(part, axis, source):
    if source is None:
        return part
    is_source = jax.lax.axis_index(axis) == source
    return jnp.where(is_source, part, jnp.zeros_like(part))
