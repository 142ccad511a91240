"""Collectives with gradients, for layers that are written by hand.

The first dim of a tensor indexes the devices of one mesh axis, and is split
over that axis: device `i` of the axis holds `x[i]`. The other dims keep their
splits. Each function is a linear map of such tensors, so `Returns:` defines it
without any device.

The functions consist of sums and layouts, and DTensor's SPMD expansion turns
them into collectives. It sums whole tensors before each device keeps its part.
`all_gather` replicates the other dims too.
"""

import tensorflow as tf
from tensorflow.experimental import dtensor

from keras_tp.backend.tensorflow import placement


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
    x = _known(x, device_mesh, axis)
    return _on_each(tf.reduce_sum(x, 0, keepdims=True), device_mesh, axis)


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
    x = _known(x, device_mesh, axis)
    whole = tf.reshape(_replicated(x, device_mesh), (1, -1, *_dims(x)[2:]))
    return _on_each(whole, device_mesh, axis)


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
    x = _known(x, device_mesh, axis)
    return _parts_of(tf.reduce_sum(x, 0), device_mesh, axis)


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
    x = _only(_known(x, device_mesh, axis), source)
    return _on_each(tf.reduce_sum(x, 0, keepdims=True), device_mesh, axis)


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
    x = _only(_known(x, device_mesh, axis), source)
    return _parts_of(tf.reduce_sum(x, 0), device_mesh, axis)


def _known(x, device_mesh, axis):
    """Splits an eager plain tensor over an axis; returns others as they are."""
    x = tf.convert_to_tensor(x)
    if not tf.executing_eagerly() or placement.is_dtensor(x):
        return x
    specs = [axis] + [dtensor.UNSHARDED] * (len(x.shape) - 1)
    return placement.place(x, dtensor.Layout(specs, device_mesh.backend_mesh))


def _replicated(x, device_mesh):
    if not tf.executing_eagerly() and placement.current_mesh() is None:
        # Shapes are inferred outside of any mesh.
        return x
    mesh = device_mesh.backend_mesh
    return dtensor.relayout(x, dtensor.Layout.replicated(mesh, len(x.shape)))


def _on_each(value, device_mesh, axis):
    """Splits the first dim, broadcast to the size of the axis, over the axis.

    Multiplies by ones that are split. This keeps the layout of the other dims,
    which is not known while tracing.
    """
    size = dict(zip(device_mesh.axis_names, device_mesh.shape))[axis]
    ones = tf.ones((size,) + (1,) * (len(value.shape) - 1), value.dtype)
    if tf.executing_eagerly() or placement.current_mesh() is not None:
        specs = [axis] + [dtensor.UNSHARDED] * (len(ones.shape) - 1)
        layout = dtensor.Layout(specs, device_mesh.backend_mesh)
        ones = placement.place(ones, layout)
    return value * ones


def _parts_of(value, device_mesh, axis):
    size = dict(zip(device_mesh.axis_names, device_mesh.shape))[axis]
    parts = tf.reshape(value, (size, -1, *_dims(value)[1:]))
    return _on_each(parts, device_mesh, axis)


def _dims(x):
    """Returns the sizes of the dims; unknown sizes as tensors."""
    return [
        tf.shape(x)[dim] if size is None else size
        for dim, size in enumerate(x.shape)
    ]


def _only(x, source):
    mask = tf.one_hot(source, x.shape[0], dtype=x.dtype)
    return x * tf.reshape(mask, (-1,) + (1,) * (len(x.shape) - 1))
