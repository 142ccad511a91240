"""Collectives with gradients; `backend/communication.py` documents them.

They are ordinary computations of tensors whose first dim is split: XLA makes a
collective of each.
"""

from keras_tp.backend.torch_xla import placement


def all_reduce(x, device_mesh, axis, source=None):
    """Adds up `x` over an axis, or only the part of device `source`."""
    x = _split(x, device_mesh, axis)
    total = x[source : source + 1] if source is not None else x
    total = total.sum(0, keepdim=True)
    return _split(total.expand(x.shape).clone(), device_mesh, axis)


def all_gather(x, device_mesh, axis):
    """Concatenates `x` over an axis."""
    x = _split(x, device_mesh, axis)
    count, size, *others = x.shape
    whole = x.reshape(1, count * size, *others)
    whole = whole.expand(count, *whole.shape[1:]).clone()
    return _split(whole, device_mesh, axis)


def reduce_scatter(x, device_mesh, axis, source=None):
    """Splits the result of `all_reduce` over the axis."""
    x = _split(x, device_mesh, axis)
    count, size, *others = x.shape
    total = x.sum(0) if source is None else x[source]
    parts = total.reshape(count, size // count, *others)
    return _split(parts, device_mesh, axis)


def _split(x, device_mesh, axis):
    axes = (axis,) + (None,) * (x.ndim - 1)
    placed = placement.Placement(device_mesh.backend_mesh, axes)
    return placement.constrained(x, placed)
