"""Gathers of the outputs of layers, as a plan has them."""

import contextlib

import jax
from jax.sharding import PartitionSpec


class _Exports:
    """The exports that are under way."""

    count = 0


_exports = _Exports()


@contextlib.contextmanager
def exporting(model):
    """Context in which a model is exported.

    Programs with a `shard_map` do not run in TensorFlow.
    """
    _exports.count += 1
    try:
        yield
    finally:
        _exports.count -= 1


def is_one(layout):
    """Returns whether a layout gathers a layer's output, and no more.

    Where the gradient is a sum over the devices, XLA itself makes a
    reduce-scatter of the sum and the split.
    """
    # Layouts of Keras have no such attributes.
    gathered = getattr(layout, "gathered_from", None) is not None
    return gathered and not layout.is_scattered


def gather(x, before, after):
    """Returns a split tensor as a whole one.

    With constraints alone, XLA may split what is computed before the gather and
    after it, such as a residual stream, and gather these tensors again.

    Args:
        x: Tracer.
        before: `TensorLayout` that splits a dim of the tensor.
        after: `TensorLayout` in which the dim is whole.

    Returns:
        Tensor; `None` if the layouts differ in another way, if the devices do
        not divide a dim, or if the program is exported.
    """
    if _exports.count:
        return None
    pairs = enumerate(zip(before.axes, after.axes, strict=True))
    changed = [dim for dim, (old, new) in pairs if old != new]
    in_shard_map = jax.sharding.get_abstract_mesh().manual_axes
    if len(changed) != 1 or in_shard_map or not _divide(before, x.shape):
        return None
    (dim,) = changed
    axis = before.axes[dim]
    return jax.shard_map(
        lambda part: jax.lax.all_gather(
            part, axis, axis=dim, tiled=True, to="invarying"
        ),
        mesh=before.device_mesh.backend_mesh,
        in_specs=PartitionSpec(*before.axes),
        out_specs=PartitionSpec(*after.axes),
    )(x)


def _divide(layout, shape):
    mesh = layout.device_mesh
    sizes = dict(zip(mesh.axis_names, mesh.shape))
    # The size of a batch may be a symbol, as in `export`.
    return all(
        isinstance(size, int) and size % sizes.get(axis, 1) == 0
        for size, axis in zip(shape, layout.axes, strict=True)
    )
