"""Collectives inside of `jax.shard_map`, whose gradients are each other.

Processes on CPUs use no reduce-scatter: with jaxlib 0.10, its sums of large
parts (16 MiB) are wrong on one device, without an error
(https://github.com/jax-ml/jax/issues/40830).
"""

import jax
import jax.numpy as jnp

from keras_tp.backend.jax import processes


def all_gather(part, axis, dim):
    """Returns the parts of all devices along a mesh axis, joined along a dim.

    Each device has a copy of its own: the gradient is the sum of its gradients
    on all devices.

    Args:
        part: Array, the part of this device.
        axis: String, a mesh axis.
        dim: Int, the dim that the axis splits.
    """
    if not processes.are_on_cpus():
        return jax.lax.all_gather(part, axis, axis=dim, tiled=True)
    # The gradient of an all-gather is a reduce-scatter.
    size = part.shape[dim]
    count = jax.lax.axis_size(axis)
    whole = jnp.concatenate([jnp.zeros_like(part)] * count, dim)
    first = jax.lax.axis_index(axis) * size
    whole = jax.lax.dynamic_update_slice_in_dim(whole, part, first, dim)
    return jax.lax.pcast(jax.lax.psum(whole, axis), axis, to="varying")


def reduce_scatter(part, axis, dim):
    """Returns this device's part of a sum over the devices of a mesh axis.

    Args:
        part: Array, what this device adds.
        axis: String, a mesh axis.
        dim: Int, the dim that the axis splits.
    """
    if not processes.are_on_cpus():
        return jax.lax.psum_scatter(
            part, axis, scatter_dimension=dim, tiled=True
        )
    size = part.shape[dim] // jax.lax.axis_size(axis)
    first = jax.lax.axis_index(axis) * size
    whole = jax.lax.psum(part, axis)
    return jax.lax.dynamic_slice_in_dim(whole, first, size, dim)
