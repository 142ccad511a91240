"""The largest of values that are split, such as the logits of a vocabulary."""

import math

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from keras.src.backend.jax import core
from keras.src.distribution.distribution_lib import distribution


def top_k(original, x, k, sorted=True):
    """Finds the candidates of each device's part, then the best of them.

    XLA alone gathers all values. Equal values keep their order in both steps,
    so the result is equal to that of a `top_k` of all values.
    """
    x = core.convert_to_tensor(x)
    mesh, batch, axes, parts = _split()
    is_traced = isinstance(x, jax.core.Tracer) and x.ndim
    size = x.shape[-1] if is_traced else None
    # A size may be a symbol, as in `export`.
    if parts == 1 or not isinstance(size, int) or k * parts * 2 > size:
        return original(x, k, sorted=sorted)
    if size % parts:
        # The padding comes after all values that are as small.
        x = _padded(x, -size % parts)
    rows = [None] * (x.ndim - 1)
    if rows and batch is not None and isinstance(x.shape[0], int):
        rows[0] = None if x.shape[0] % mesh.shape[batch] else batch
    spec = PartitionSpec(*rows, axes)

    def candidates(part):
        values, places = jax.lax.top_k(part, k)
        first = jax.lax.axis_index(axes) * part.shape[-1]
        return values, places + first.astype(places.dtype)

    values, places = jax.shard_map(
        candidates, mesh=mesh, in_specs=spec, out_specs=(spec, spec)
    )(x)
    values, chosen = original(values, k, sorted=sorted)
    return values, jnp.take_along_axis(places, chosen, axis=-1)


def _split():
    """Returns the mesh, the batch's axis, the other axes and their size."""
    current = distribution()
    mesh = getattr(current, "device_mesh", None)
    if mesh is None:
        return None, None, (), 1
    mesh, batch = mesh.backend_mesh, current.batch_dim_name
    axes = tuple(axis for axis in mesh.axis_names if axis != batch)
    return mesh, batch, axes, math.prod(mesh.shape[axis] for axis in axes)


def _padded(x, count):
    """Adds `count` of the smallest values at the end of the last dim."""
    if jnp.issubdtype(x.dtype, jnp.floating):
        smallest = -jnp.inf
    else:
        smallest = jnp.iinfo(x.dtype).min
    widths = [(0, 0)] * (x.ndim - 1) + [(0, count)]
    return jnp.pad(x, widths, constant_values=smallest)
