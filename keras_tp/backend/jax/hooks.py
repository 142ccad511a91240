"""What keras_tp replaces in Keras on JAX."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from keras.src.backend.jax import core
from keras.src.distribution.distribution_lib import distribution

from keras_tp.backend.hooks import Hook


def batch_layout(batch, layout):
    """Returns the sharding for a batch: replicated if it does not divide.

    Replicating a batch over the batch axis leaves its numbers as they are:
    every device computes all of it, and the mean is over the same samples.

    Args:
        batch: Array or scalar, or `None`, which is returned as it is.
        layout: `TensorLayout` or `jax.sharding.Sharding`.
    """
    sharding = getattr(layout, "backend_layout", layout)
    if batch is None or not isinstance(sharding, jax.sharding.NamedSharding):
        return sharding
    sizes = sharding.mesh.shape
    for size, axis in zip(batch.shape, sharding.spec):
        names = axis if isinstance(axis, tuple) else (axis,) if axis else ()
        # Each process brings its part of the dim.
        if size * jax.process_count() % math.prod(sizes[n] for n in names):
            return jax.sharding.NamedSharding(
                sharding.mesh, jax.sharding.PartitionSpec()
            )
    return sharding


def _hook_distribute_data_input(original):
    @functools.wraps(original)
    def distribute_data_input(per_process_batch, layout, batch_dim_name):
        if per_process_batch is None:
            return None
        return original(
            per_process_batch,
            batch_layout(per_process_batch, layout),
            batch_dim_name,
        )

    return distribute_data_input


def _hook_repeat(original):
    """Heads of keys that stay whole, repeated for those of queries.

    `jnp.repeat` broadcasts to a new dim and joins it with the old one. Split
    over more devices than there are heads, XLA would split both of these dims,
    and gather what it so split in the backward pass. Looked up instead, each
    device has its own, and the gradient is one sum.
    """

    @functools.wraps(original)
    def repeat(x, repeats, axis=None):
        if isinstance(repeats, int) and axis is not None:
            size = x.shape[axis]
            if _only_repeated_divides(size, repeats):
                index = np.repeat(np.arange(size), repeats)
                x = core.convert_to_tensor(x)
                return jnp.take(x, index, axis=axis, mode="clip")
        return original(x, repeats, axis=axis)

    return repeat


def _only_repeated_divides(size, repeats):
    mesh = getattr(distribution(), "device_mesh", None)
    return mesh is not None and any(
        size % count and size * repeats % count == 0 for count in mesh.shape
    )


TABLE = [
    Hook(
        "keras.src.backend.jax.numpy",
        "repeat",
        _hook_repeat,
        "heads that are fewer than the devices are not gathered",
    ),
    Hook(
        "keras.src.backend.jax.distribution_lib",
        "distribute_data_input",
        _hook_distribute_data_input,
        "a last batch that the batch axis does not divide is replicated",
    ),
]
