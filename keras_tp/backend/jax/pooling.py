"""Max pooling of images whose height or width is split."""

import functools
import inspect

import jax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec
from keras.src import backend
from keras.src.backend.jax import core
from keras.src.distribution.distribution_lib import distribution


def hook_max_pool(original):
    """Replicates the pooled dims before max pooling.

    XLA's partitioner computes a wrong gradient if windows overlap, have stride
    1, and cross the border of two devices. Batch and channels stay split.
    """

    signature = inspect.signature(original)

    @functools.wraps(original)
    def max_pool(inputs, *args, **kwargs):
        mesh = getattr(distribution(), "device_mesh", None)
        if mesh is None:
            return original(inputs, *args, **kwargs)
        inputs = core.convert_to_tensor(inputs)
        given = signature.bind(inputs, *args, **kwargs).arguments
        form = backend.standardize_data_format(given.get("data_format"))
        channels = 1 if form == "channels_first" else inputs.ndim - 1
        sharding = _whole_windows(mesh.backend_mesh, inputs.ndim, channels)
        outputs = original(_constrained(inputs, sharding), *args, **kwargs)
        # Constrains the gradient too.
        return _constrained(outputs, sharding)

    return max_pool


def _whole_windows(mesh, rank, channels):
    free = PartitionSpec.UNCONSTRAINED
    spec = [free if dim in (0, channels) else None for dim in range(rank)]
    return NamedSharding(mesh, PartitionSpec(*spec))


@functools.partial(jax.jit, static_argnums=1)
def _constrained(x, sharding):
    return jax.lax.with_sharding_constraint(x, sharding)
