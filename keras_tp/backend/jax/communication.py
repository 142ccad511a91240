"""Collectives with gradients, for layers that are written by hand.

The first dim of a tensor indexes the devices of one mesh axis, and is split
over that axis: device `i` of the axis holds `x[i]`. The other dims keep their
splits. Each function is a linear map of such tensors, so `Returns:` defines it
without any device.

Processes on CPUs use no reduce-scatter: with jaxlib 0.10, its sums of large
parts (16 MiB) are wrong on one device, without an error
(https://github.com/jax-ml/jax/issues/40830).
"""

import jax
import jax.numpy as jnp

from keras_tp.backend.jax import processes


def all_reduce(x, device_mesh, axis):
    """Sums the parts of an axis's devices; each device gets the sum.

    The gradient is an all-reduce too.

    Args:
        x: Tensor of shape `(n, ...)`; the axis has `n` devices.
        device_mesh: `DeviceMesh`.
        axis: String, axis of the mesh.

    Returns:
        Tensor of the same shape: `y[i] = sum(x[j] for all j)`.
    """
    return _map(lambda part: jax.lax.psum(part, axis), x, device_mesh, axis)


def all_gather(x, device_mesh, axis):
    """Concatenates the parts of an axis's devices; each device gets all.

    The gradient is a reduce-scatter.

    Args:
        x: Tensor of shape `(n, k, ...)`; the axis has `n` devices.
        device_mesh: `DeviceMesh`.
        axis: String, axis of the mesh.

    Returns:
        Tensor of shape `(n, n * k, ...)`: `y[i] = concatenate(x)`.
    """
    return _map(lambda part: _all_gather(part, axis), x, device_mesh, axis)


def reduce_scatter(x, device_mesh, axis):
    """Sums the parts of an axis's devices; each gets its part of the sum.

    The gradient is an all-gather.

    Args:
        x: Tensor of shape `(n, n * k, ...)`; the axis has `n` devices.
        device_mesh: `DeviceMesh`.
        axis: String, axis of the mesh.

    Returns:
        Tensor of shape `(n, k, ...)`: `y[i] = split(sum(x), n)[i]`.
    """
    return _map(lambda part: _reduce_scatter(part, axis), x, device_mesh, axis)


def broadcast(x, device_mesh, axis, source=0):
    """Sends the part of one device to all devices of an axis.

    Implemented as an all-reduce with zeros. The gradient is the sum over the
    devices, on the source device.

    Args:
        x: Tensor of shape `(n, ...)`; the axis has `n` devices.
        device_mesh: `DeviceMesh`.
        axis: String, axis of the mesh.
        source: Int, index of the device on the axis. Defaults to 0.

    Returns:
        Tensor of the same shape: `y[i] = x[source]`.
    """
    return _map(
        lambda part: jax.lax.psum(_only(part, axis, source), axis),
        x,
        device_mesh,
        axis,
    )


def scatter(x, device_mesh, axis, source=0):
    """Splits the part of one device over all devices of an axis.

    Implemented as a reduce-scatter with zeros. The gradient is gathered on the
    source device.

    Args:
        x: Tensor of shape `(n, n * k, ...)`; the axis has `n` devices.
        device_mesh: `DeviceMesh`.
        axis: String, axis of the mesh.
        source: Int, index of the device on the axis. Defaults to 0.

    Returns:
        Tensor of shape `(n, k, ...)`: `y[i] = split(x[source], n)[i]`.
    """
    return _map(
        lambda part: _reduce_scatter(_only(part, axis, source), axis),
        x,
        device_mesh,
        axis,
    )


def _map(function, x, device_mesh, axis):
    """Runs a function on the part of each device of an axis."""
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
        # The gradient of `jax.lax.all_gather` is a reduce-scatter.
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
    is_source = jax.lax.axis_index(axis) == source
    return jnp.where(is_source, part, jnp.zeros_like(part))
