"""Convolutions of groups of channels."""

import functools
import inspect

import jax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec
from keras.src.distribution.distribution_lib import distribution


def hook_conv(original):
    """Computes the convolutions of groups, which XLA's partitioner does not.

    It doubles the gradient of the kernel, without an error, if the batch is
    split over one mesh axis and the mesh has another (jax 0.10). So each part
    of the batch is convolved by itself. It ends the process if the kernel's
    input channels are split, so these are replicated.
    """

    signature = inspect.signature(original)

    @functools.wraps(original)
    def conv_general_dilated(lhs, rhs, *args, **kwargs):
        given = signature.bind(lhs, rhs, *args, **kwargs).arguments
        parallel = distribution()
        mesh = getattr(parallel, "device_mesh", None)
        if (
            mesh is None
            or given.get("feature_group_count", 1) == 1
            # Each device has its own part already.
            or jax.sharding.get_abstract_mesh().manual_axes
        ):
            return original(lhs, rhs, *args, **kwargs)
        dims = jax.lax.conv_dimension_numbers(
            lhs.shape, rhs.shape, given.get("dimension_numbers")
        )
        options = {name: _hashable(given[name]) for name in given}
        del options["lhs"], options["rhs"]
        options["dimension_numbers"] = dims
        axis = parallel.batch_dim_name
        size = dict(zip(mesh.axis_names, mesh.shape)).get(axis, 1)
        if lhs.shape[dims.lhs_spec[0]] % size or size in (1, mesh.devices.size):
            axis = None
        return _conv_of_groups(
            lhs,
            rhs,
            original,
            tuple(options.items()),
            mesh.backend_mesh,
            axis,
        )

    return conv_general_dilated


def _hashable(value):
    if isinstance(value, (list, tuple)):
        return tuple(map(_hashable, value))
    return value


@functools.partial(jax.jit, static_argnums=(2, 3, 4, 5))
def _conv_of_groups(lhs, rhs, original, options, mesh, batch_axis):
    options = dict(options)
    dims = options["dimension_numbers"]
    free = PartitionSpec.UNCONSTRAINED
    in_channels = dims.rhs_spec[1]
    spec = [None if d == in_channels else free for d in range(rhs.ndim)]
    sharding = NamedSharding(mesh, PartitionSpec(*spec))
    rhs = jax.lax.with_sharding_constraint(rhs, sharding)
    conv = functools.partial(original, **options)
    if batch_axis is not None:
        conv = jax.shard_map(
            conv,
            mesh=mesh,
            in_specs=(_at(dims.lhs_spec[0], batch_axis), PartitionSpec()),
            out_specs=_at(dims.out_spec[0], batch_axis),
            axis_names={batch_axis},
        )
    return conv(lhs, rhs)


def _at(dim, axis):
    return PartitionSpec(*[None] * dim, axis)
