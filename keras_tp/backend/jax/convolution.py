"""Convolutions, where XLA's partitioner computes them wrongly."""

import functools
import inspect

import jax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec
from keras.src.backend.jax import core
from keras.src.distribution.distribution_lib import distribution


def hook_conv(original):
    """Lays out the inputs of convolutions so that XLA computes them correctly.

    With jax 0.10, on a mesh of two axes, the gradient of a kernel is doubled,
    without an error, if height or width is split along one axis, or if the
    batch is and the convolution has groups. So height and width are
    replicated, of images and kernels, and each part of a batch is convolved by
    itself. On any mesh, XLA ends the process if the input channels of the
    kernel of a grouped convolution are split, so they are replicated.
    """

    signature = inspect.signature(original)

    @functools.wraps(original)
    def conv_general_dilated(lhs, rhs, *args, **kwargs):
        given = signature.bind(lhs, rhs, *args, **kwargs).arguments
        parallel = distribution()
        mesh = getattr(parallel, "device_mesh", None)
        if mesh is None or jax.sharding.get_abstract_mesh().manual_axes:
            return original(lhs, rhs, *args, **kwargs)
        sizes = dict(zip(mesh.axis_names, mesh.shape))
        has_groups = given.get("feature_group_count", 1) > 1
        is_wide = max(mesh.shape) < mesh.devices.size
        if not has_groups and not is_wide:
            return original(lhs, rhs, *args, **kwargs)
        dims = jax.lax.conv_dimension_numbers(
            lhs.shape, rhs.shape, given.get("dimension_numbers")
        )
        options = {
            name: _hashable(value)
            for name, value in given.items()
            if name not in ("lhs", "rhs")
        }
        options["dimension_numbers"] = dims
        axis = parallel.batch_dim_name
        parts = sizes.get(axis, 1)
        by_part = has_groups and is_wide and parts > 1
        if not by_part or lhs.shape[dims.lhs_spec[0]] % parts:
            axis = None
        return _laid_out(
            lhs,
            rhs,
            original,
            tuple(options.items()),
            mesh.backend_mesh,
            axis,
            is_wide,
            has_groups,
        )

    return conv_general_dilated


def correlate(original, x1, x2, mode="valid"):
    """Replicates both inputs, for the same reason as `hook_conv`.

    `jnp.correlate` does not call the function that `hook_conv` replaces.
    """
    mesh = getattr(distribution(), "device_mesh", None)
    if mesh is not None and max(mesh.shape) < mesh.devices.size:
        x1, x2 = map(core.convert_to_tensor, (x1, x2))
        whole = jax.jit(_replicated, static_argnums=(1, 2))
        x1, x2 = (whole(x, (0,), mesh.backend_mesh) for x in (x1, x2))
    return original(x1, x2, mode)


def _hashable(value):
    if isinstance(value, (list, tuple)):
        return tuple(map(_hashable, value))
    return value


@functools.partial(jax.jit, static_argnums=range(2, 8))
def _laid_out(lhs, rhs, original, options, mesh, axis, is_wide, has_groups):
    options = dict(options)
    dims = options["dimension_numbers"]
    conv = functools.partial(original, **options)
    whole = (*dims.rhs_spec[1:2] * has_groups, *dims.rhs_spec[2:] * is_wide)
    rhs = _replicated(rhs, whole, mesh)
    if axis is not None:
        conv = jax.shard_map(
            conv,
            mesh=mesh,
            in_specs=(_at(dims.lhs_spec[0], axis), PartitionSpec()),
            out_specs=_at(dims.out_spec[0], axis),
            axis_names={axis},
        )
    if not is_wide:
        return conv(lhs, rhs)
    outputs = conv(_replicated(lhs, dims.lhs_spec[2:], mesh), rhs)
    # Constrains the gradient too.
    return _replicated(outputs, dims.out_spec[2:], mesh)


def _replicated(x, dims, mesh):
    free = PartitionSpec.UNCONSTRAINED
    spec = [None if dim in dims else free for dim in range(x.ndim)]
    sharding = NamedSharding(mesh, PartitionSpec(*spec))
    return jax.lax.with_sharding_constraint(x, sharding)


def _at(dim, axis):
    return PartitionSpec(*[None] * dim, axis)
