"""Collectives with gradients, for layers that are written by hand.

The first dim of a tensor indexes the devices of one mesh axis, and is split
over that axis: device `i` of the axis holds `x[i]`. The other dims keep their
splits. Each function is a linear map of such tensors, so `Returns:` defines it
without any device. Where there are several processes, all of them have to call
each function.
"""

from keras_tp.backend import current


def all_reduce(x, device_mesh, axis):
    """Sums the parts of an axis's devices; each device gets the sum.

    The gradient is an all-reduce too.

    Args:
        x: Tensor of shape `(n, ...)`; the axis has `n` devices.
        device_mesh: `DeviceMesh`.
        axis: String, axis of the mesh.

    Returns:
        Tensor of the same shape: `y[i] = sum(x[j] for all j)`.
    """
    return _collectives().all_reduce(x, device_mesh, axis)


def all_gather(x, device_mesh, axis):
    """Concatenates the parts of an axis's devices; each device gets all.

    The gradient is a reduce-scatter.

    Args:
        x: Tensor of shape `(n, k, ...)`; the axis has `n` devices.
        device_mesh: `DeviceMesh`.
        axis: String, axis of the mesh.

    Returns:
        Tensor of shape `(n, n * k, ...)`: `y[i] = concatenate(x)`.
    """
    return _collectives().all_gather(x, device_mesh, axis)


def reduce_scatter(x, device_mesh, axis):
    """Sums the parts of an axis's devices; each gets its part of the sum.

    The gradient is an all-gather.

    Args:
        x: Tensor of shape `(n, n * k, ...)`; the axis has `n` devices.
        device_mesh: `DeviceMesh`.
        axis: String, axis of the mesh.

    Returns:
        Tensor of shape `(n, k, ...)`: `y[i] = split(sum(x), n)[i]`.
    """
    return _collectives().reduce_scatter(x, device_mesh, axis)


def broadcast(x, device_mesh, axis, source=0):
    """Sends the part of one device to all devices of an axis.

    Implemented as an all-reduce with zeros. The gradient is the sum over the
    devices, on the source device.

    Args:
        x: Tensor of shape `(n, ...)`; the axis has `n` devices.
        device_mesh: `DeviceMesh`.
        axis: String, axis of the mesh.
        source: Int, index of the device on the axis. Defaults to 0.

    Returns:
        Tensor of the same shape: `y[i] = x[source]`.
    """
    return _collectives().all_reduce(x, device_mesh, axis, source)


def scatter(x, device_mesh, axis, source=0):
    """Splits the part of one device over all devices of an axis.

    Implemented as a reduce-scatter with zeros. The gradient is gathered on the
    source device.

    Args:
        x: Tensor of shape `(n, n * k, ...)`; the axis has `n` devices.
        device_mesh: `DeviceMesh`.
        axis: String, axis of the mesh.
        source: Int, index of the device on the axis. Defaults to 0.

    Returns:
        Tensor of shape `(n, k, ...)`: `y[i] = split(x[source], n)[i]`.
    """
    return _collectives().reduce_scatter(x, device_mesh, axis, source)


def _collectives():
    return current.load("collectives")
