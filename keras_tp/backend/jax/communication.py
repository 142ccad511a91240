"""Collectives with gradients, for layers that are written by hand.

A tensor has the devices of one mesh axis as its first dim, split over that
axis: `x[i]` is what device `i` of the axis holds. Each function is a linear
map of such tensors, so it means the same without any device: see `Returns:`.
The other dims stay as they are split.

Between processes of CPUs nothing is reduce-scattered: the sums of large parts
(16 MiB, with jaxlib 0.10) would be wrong on one device, without an error
(https://github.com/jax-ml/jax/issues/40830).
"""

import jax
import jax.numpy as jnp

from keras_tp.backend.jax import processes


def all_reduce(x, device_mesh, axis):
    """Adds up what the devices of an axis hold; each has the sum.

    The gradient is an all-reduce too.

    Args:
        x: Tensor of shape `(n, ...)`, `n` devices being on the axis.
        device_mesh: `DeviceMesh`.
        axis: String, axis of the mesh.

    Returns:
        Tensor of the same shape: `y[i] = sum(x[j] for all j)`.
    """
    return _map(lambda part: jax.lax.psum(part, axis), x, device_mesh, axis)


def all_gather(x, device_mesh, axis):
    """Puts together what the devices of an axis hold; each has all of it.

    The gradient is a reduce-scatter.

    Args:
        x: Tensor of shape `(n, k, ...)`, `n` devices being on the axis.
        device_mesh: `DeviceMesh`.
        axis: String, axis of the mesh.

    Returns:
        Tensor of shape `(n, n * k, ...)`: `y[i] = concatenate(x)`.
    """
    return _map(lambda part: _all_gather(part, axis), x, device_mesh, axis)


def reduce_scatter(x, device_mesh, axis):
    """Adds up what the devices of an axis hold; each has its part of the sum.

    The gradient is an all-gather.

    Args:
        x: Tensor of shape `(n, n * k, ...)`, `n` devices being on the axis.
        device_mesh: `DeviceMesh`.
        axis: String, axis of the mesh.

    Returns:
        Tensor of shape `(n, k, ...)`: `y[i] = split(sum(x), n)[i]`.
    """
    return _map(lambda part: _reduce_scatter(part, axis), x, device_mesh, axis)


def broadcast(x, device_mesh, axis, source=0):
    """Gives all devices of an axis what one of them holds.

    The gradient is the sum over the devices, on the one they came from. Done as
    an all-reduce with zeros.

    Args:
        x: Tensor of shape `(n, ...)`, `n` devices being on the axis.
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
    """Gives each device of an axis its part of what one of them holds.

    The gradient is gathered on the device that the parts came from. Done as
    a reduce-scatter with zeros.

    Args:
        x: Tensor of shape `(n, n * k, ...)`, `n` devices being on the axis.
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
    """Runs a function on what each device of an axis holds."""
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
    is_source = jax.lax.axis_index(axis) == source
    return jnp.where(is_source, part, jnp.zeros_like(part))
