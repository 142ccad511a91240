"""Moves tensors, such as batches, onto a mesh and off it."""

import warnings

import numpy as np
import tensorflow as tf
from keras.src import backend as keras_backend
from keras.src import tree
from keras.src.trainers.data_adapters import data_adapter_utils
from tensorflow.experimental import dtensor

from keras_tp.backend.tensorflow import errors
from keras_tp.backend.tensorflow import placement

# Warn if the dense rows of a sparse batch take more than this on a device.
LARGE_BATCH_BYTES = 2**28


def batch_layout(shape, mesh, axis):
    """Returns the layout of a batch: replicated if the axis does not divide it.

    `axis` is the mesh axis that splits the first dim, or `None`.
    """
    specs = [dtensor.UNSHARDED] * len(shape)
    if specs and axis is not None and shape[0] is not None:
        if shape[0] % mesh.dim_size(axis) == 0:
            specs[0] = axis
    return dtensor.Layout(specs, mesh)


def place_batch(batch, mesh, axis, part=(0, 1)):
    """Puts a batch on the devices; replicated if the axis does not divide it.

    A sparse tensor becomes dense. `None`, strings, DTensors and scipy matrices
    are returned as they are. `part` is the index of this process's part of the
    global batch, and the number of parts.
    """
    if batch is None or isinstance(batch, tf.experimental.Optional):
        return None
    if isinstance(batch, tf.RaggedTensor):
        raise ValueError(
            "DTensor holds dense tensors only. Convert the data with "
            f"`to_tensor()`. Received: a RaggedTensor of shape {batch.shape}"
        )
    if isinstance(batch, tf.SparseTensor):
        return _place_sparse(batch, mesh, axis)
    if placement.is_dtensor(batch) or data_adapter_utils.is_scipy_sparse(batch):
        # TensorFlow itself raises an error for a scipy matrix.
        return batch
    if not tf.is_tensor(batch):
        with tf.device("CPU:0"):
            batch = tf.convert_to_tensor(batch)
    if batch.dtype in (tf.string, tf.resource, tf.variant):
        return batch
    shape = list(batch.shape)
    index, count = part
    if count == 1 or not shape:
        return placement.place(batch, batch_layout(shape, mesh, axis))
    # The devices of a process hold consecutive parts of the global batch.
    whole = [shape[0] * count, *shape[1:]]
    value = batch.numpy()
    first = index * shape[0]
    return placement.place_parts(
        lambda held: value[held[0][0] - first : held[0][1] - first],
        tuple(whole),
        batch_layout(whole, mesh, axis),
    )


def _place_sparse(batch, mesh, axis):
    """Makes the rows of a sparse batch dense and puts them on the devices.

    DTensor computes with dense tensors only. A device holds only its own rows;
    the host holds the rows of all devices of this process meanwhile.
    """
    if batch.dtype == tf.string:
        return batch
    shape = tuple(batch.shape)
    layout = batch_layout(shape, mesh, axis)
    indices, entries = batch.indices.numpy(), batch.values.numpy()

    def part_of(part):
        (start, stop), *_ = part
        held = (indices[:, 0] >= start) & (indices[:, 0] < stop)
        rows = np.zeros((stop - start, *shape[1:]), entries.dtype)
        if rows.nbytes > LARGE_BATCH_BYTES:
            warnings.warn(
                f"A sparse batch of shape {shape} is made dense, because "
                "DTensor computes with dense tensors only. It takes "
                f"{rows.nbytes / 2**20:.0f} MiB on each device. Smaller "
                "batches take less memory.",
                stacklevel=2,
            )
        first, *others = indices[held].T
        # Duplicate entries are summed.
        np.add.at(rows, (first - start, *others), entries[held])
        return rows

    return placement.place_parts(part_of, shape, layout)


def enter_mesh(value, mesh, axis):
    """Places a batch as `place_batch` does; its gradient is a plain tensor."""
    if placement.is_dtensor(value):
        return value

    @tf.custom_gradient
    def enter(x):
        return place_batch(x, mesh, axis), placement.to_host

    is_tensor = isinstance(value, tf.Tensor)
    if is_tensor and value.dtype.is_floating:
        placed = enter(value)
    else:
        placed = place_batch(value, mesh, axis)
    if placed is not value and is_tensor:
        _copy_notes(value, placed, lambda x: enter_mesh(x, mesh, axis))
    return placed


def leave_mesh(value):
    """Returns an eager DTensor as a plain tensor, for use with plain tensors.

    Its gradient is placed on the mesh again.
    """
    if not isinstance(value, tf.Tensor) or not placement.is_dtensor(value):
        return value
    layout = placement.layout_of(value)

    @tf.custom_gradient
    def leave(x):
        return placement.to_host(x), lambda dy: placement.place(dy, layout)

    is_floating = value.dtype.is_floating
    plain = leave(value) if is_floating else placement.to_host(value)
    _copy_notes(value, plain, leave_mesh)
    return plain


def _copy_notes(tensor, copy, move):
    """Copies Keras's mask and logits attributes, moved like the tensor."""
    for name in ("_keras_mask", "_keras_logits"):
        if getattr(tensor, name, None) is not None:
            setattr(copy, name, move(getattr(tensor, name)))


def call_on_mesh(mesh, axis, function, args, kwargs, is_value):
    """Calls a function on a mesh from outside of it.

    `is_value` tells which of the arguments are placed on the mesh.
    """

    def placed(x):
        return enter_mesh(x, mesh, axis) if is_value(x) else x

    args, kwargs = tree.map_structure(placed, (args, kwargs))
    with placement.on_mesh(mesh, axis), errors.explained():
        outputs = function(*args, **kwargs)
    # Later code runs off the mesh and needs whole, plain tensors.
    return tree.map_structure(leave_mesh, outputs)


def symbolic(x):
    """Returns a `KerasTensor` in place of an array or tensor."""
    if not hasattr(x, "shape") or not hasattr(x, "dtype"):
        return x
    # Keras does not know numpy's string dtypes, which include a length.
    is_text = getattr(x.dtype, "kind", None) in ("O", "S", "U")
    dtype = "string" if is_text else keras_backend.standardize_dtype(x.dtype)
    return keras_backend.KerasTensor(x.shape, dtype)
