"""Collectives with gradients; `backend/communication.py` documents them.

They are sums and layouts; DTensor's SPMD expansion makes collectives of them.
It adds up whole tensors, and each device keeps its part of the sum;
`all_gather` leaves the other dims whole too.
"""

import tensorflow as tf
from tensorflow.experimental import dtensor

from keras_tp.backend.tensorflow import placement


def all_reduce(x, device_mesh, axis, source=None):
    """Adds up `x` over an axis, or only the part of device `source`."""
    x = _only(_known(x, device_mesh, axis), source)
    return _on_each(tf.reduce_sum(x, 0, keepdims=True), device_mesh, axis)


def all_gather(x, device_mesh, axis):
    """Concatenates `x` over an axis."""
    x = _known(x, device_mesh, axis)
    whole = tf.reshape(_replicated(x, device_mesh), (1, -1, *_dims(x)[2:]))
    return _on_each(whole, device_mesh, axis)


def reduce_scatter(x, device_mesh, axis, source=None):
    """Splits the result of `all_reduce` over the axis."""
    x = _only(_known(x, device_mesh, axis), source)
    return _parts_of(tf.reduce_sum(x, 0), device_mesh, axis)


def _known(x, device_mesh, axis):
    """Returns a tensor of an eager call, if plain, split over an axis."""
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
    """Splits the first dim over an axis. Its size is 1 or the axis's size.

    The product with split ones keeps the layout of the other dims, which is
    unknown while tracing.
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
    """Returns the sizes of the dims; as tensors where they are not known."""
    return [
        tf.shape(x)[dim] if size is None else size
        for dim, size in enumerate(x.shape)
    ]


def _only(x, source):
    if source is None:
        return x
    mask = tf.range(x.shape[0]) == source
    mask = tf.reshape(mask, (-1,) + (1,) * (len(x.shape) - 1))
    # Not a product: 0 times NaN is NaN.
    return tf.where(mask, x, tf.zeros_like(x))
