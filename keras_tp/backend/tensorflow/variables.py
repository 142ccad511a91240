"""Keras variables whose value is a `dtensor.DVariable`."""

import functools

import numpy as np
import tensorflow as tf
from keras.src.distribution.distribution_lib import distribution
from tensorflow.experimental import dtensor

from keras_tp.backend.tensorflow import placement


def is_distributed(variable):
    """Returns whether a Keras variable lies on the devices of a mesh."""
    return isinstance(getattr(variable, "_value", None), dtensor.DVariable)


def relayout(variable, layout):
    """Moves a variable; see `distribution_lib.relayout_variable`."""
    old = variable._value
    shape = tuple(old.shape)
    if isinstance(old, dtensor.DVariable):
        parts = placement.local_parts(old)
    else:
        whole = tuple((0, size) for size in shape)
        parts = [(0, whole, old.read_value().numpy())]
    if layout is None:
        whole = tuple((0, size) for size in shape)
        with placement.off_mesh():
            new = tf.Variable(
                placement.part_from(parts, whole),
                trainable=variable.trainable,
                name=variable.name,
            )
    else:
        new = _variable(
            variable,
            placement.place_parts(
                lambda part: placement.part_from(parts, part),
                shape,
                layout.backend_layout,
            ),
        )
    # An optimizer knows its variables by it.
    new._unique_id = old._unique_id
    variable._layout = layout
    variable._value = new


def _variable(variable, value):
    mesh = dtensor.fetch_layout(value).mesh
    with tf.init_scope(), dtensor.default_mesh(mesh):
        return dtensor.DVariable(
            value, trainable=variable.trainable, name=variable.name
        )


def hook_initialize(original):
    """`_initialize`: each device gets its part of the value."""

    @functools.wraps(original)
    def _initialize(self, value):
        current = distribution()
        if isinstance(value, tf.Variable) or (
            current is None and self._layout is None
        ):
            return original(self, value)
        with placement.off_mesh():
            # On the host, so that the values are those of one device; all of
            # one variable is in the host's memory for that long.
            value = value() if callable(value) else value
            if placement.is_dtensor(value):
                value = placement.read(value)
            value = tf.cast(value, self._dtype)
            self._shape = self._validate_shape(value.shape)
            if self._layout is None:
                self._layout = current.get_variable_layout(self)
            placed = placement.place(value, self._layout.backend_layout)
        self._value = _variable(self, placed)

    return _initialize


def hook_direct_assign(original):
    @functools.wraps(original)
    def _direct_assign(self, value):
        if not is_distributed(self):
            return original(self, value)
        layout = self._value.layout
        if tf.executing_eagerly():
            if not placement.is_dtensor(value):
                with tf.device("CPU:0"):
                    value = tf.cast(value, self._value.dtype)
            value = placement.place(value, layout)
        value = tf.cast(value, self._value.dtype)
        with dtensor.default_mesh(layout.mesh):
            self._value.assign(value)

    return _direct_assign


def hook_numpy(original):
    @functools.wraps(original)
    def numpy(self):
        if is_distributed(self):
            return placement.read(self._value)
        return original(self)

    return numpy


def hook_array(original):
    @functools.wraps(original)
    def __array__(self, dtype=None):
        if is_distributed(self):
            return np.asarray(placement.read(self._value), dtype=dtype)
        return original(self, dtype)

    return __array__


def hook_convert_to_numpy(original):
    @functools.wraps(original)
    def convert_to_numpy(x):
        value = getattr(x, "_value", x)
        if placement.is_dtensor(value):
            return placement.read(value)
        return original(x)

    return convert_to_numpy
