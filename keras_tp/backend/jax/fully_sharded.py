"""Variables that are split over the axis of the batch too: FSDP, or ZeRO-3.

A compiled step gathers them over this axis where a layer reads them, in the
backward pass too, and splits their gradients (Rajbhandari et al. 2020). GSPMD
alone may split activations along another dim than the batch instead: it then
exchanges activations, and an attention kernel of a GPU refuses queries and keys
that are not split alike.
"""

import functools

import jax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec

from keras_tp.backend.fully_sharded import batch_axis


def gathered(variable, value):
    """Returns a value that is whole over the axis of the batch.

    Args:
        variable: Keras variable.
        value: Its value as it is stored. Outside of compiled programs it stays
            as it is.
    """
    # The cheap test is first: `fit` reads every variable outside of programs.
    if not isinstance(value, jax.core.Tracer) or not is_gathered(variable):
        return value
    axis, axes = _gathered_axis(variable)
    if len(axes) != value.ndim:
        return value
    rest = [None if name == axis else name for name in axes]
    mesh = variable._layout.device_mesh.backend_mesh
    return _gather(value, *(_sharding(mesh, names) for names in (axes, rest)))


def pinned(variable, value):
    """Returns the stored value of a gathered variable, split as it is stored.

    XLA might split it in another way where it is gathered again.
    """
    _, axes = _gathered_axis(variable)
    mesh = variable._layout.device_mesh.backend_mesh
    return jax.lax.with_sharding_constraint(value, _sharding(mesh, axes))


def _sharding(mesh, names):
    return NamedSharding(mesh, PartitionSpec(*names))


def is_gathered(variable):
    """Returns whether a compiled step gathers a variable."""
    return _gathered_axis(variable)[0] is not None


def _gathered_axis(variable):
    """Returns the mesh axis, or `None`, and the axes of the stored value."""
    layout = getattr(variable, "_layout", None)
    if layout is None:
        return None, ()
    # Layouts of Keras store every tensor in its own shape.
    axes = getattr(layout, "stored_axes", layout.axes)
    return _axis_of(axes), axes


def _axis_of(axes):
    """Returns the axis of the batch if it splits a variable, or `None`."""
    axis = batch_axis(sum(name is not None for name in axes) == 1)
    return axis if axis is not None and axis in axes else None


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _gather(value, before, after):
    return jax.lax.with_sharding_constraint(value, after)


def _forward(value, before, after):
    return _gather(value, before, after), None


def _backward(before, after, _, gradient):
    return (jax.lax.with_sharding_constraint(gradient, before),)


_gather.defvjp(_forward, _backward)
