"""Keras variables whose value lies on the devices of a mesh."""

import contextlib

import numpy as np
import tensorflow as tf
from keras.src.backend.common.variables import Variable
from keras.src.distribution.distribution_lib import TensorLayout
from keras.src.distribution.distribution_lib import distribution
from keras.src.distribution.distribution_lib import set_distribution
from tensorflow.experimental import dtensor

from keras_tp.backend.hooks import around
from keras_tp.backend.saving import expected_values
from keras_tp.backend.tensorflow import boundary
from keras_tp.backend.tensorflow import fully_sharded
from keras_tp.backend.tensorflow import functions
from keras_tp.backend.tensorflow import own_memory
from keras_tp.backend.tensorflow import placement
from keras_tp.backend.tensorflow import processes


class ShardedVariable(dtensor.DVariable):
    """A `DVariable` that can be read in any layout, on the mesh and off it.

    TensorFlow reads a `DVariable` only if each device holds all of it, and does
    not mix a DTensor with plain tensors. Off the mesh, in a user's own code, an
    eager operation gets the whole value as a plain tensor. The gradient of this
    tensor is placed on the mesh again. `read_value` always returns the DTensor.
    """

    # Where the parts lay when they were put into memory of their own.
    _noted = None

    @property
    def handle(self):
        return self._held

    @property
    def _handle(self):
        # TensorFlow's generated operations use `_handle`. If it is `None`, they
        # call `value`.
        return None if _is_read_whole() else self._held

    @_handle.setter
    def _handle(self, handle):
        self._held = handle

    def value(self):
        value = super().value()
        if _is_read_whole():
            return boundary.leave_mesh(value)
        layout = fully_sharded.gathered_layout(self.layout)
        return value if layout is None else dtensor.relayout(value, layout)

    def assign(self, value, *args, **kwargs):
        with dtensor.default_mesh(self.layout.mesh):
            return super().assign(self._placed(value), *args, **kwargs)

    def assign_add(self, delta, *args, **kwargs):
        with dtensor.default_mesh(self.layout.mesh):
            return super().assign_add(self._placed(delta), *args, **kwargs)

    def assign_sub(self, delta, *args, **kwargs):
        with dtensor.default_mesh(self.layout.mesh):
            return super().assign_sub(self._placed(delta), *args, **kwargs)

    def note_memory(self):
        """Notes that the parts are in memory of their own."""
        self._noted = placement.part_addresses(self)

    def has_own_memory(self):
        """Returns whether the parts still are where they were noted.

        Otherwise a step has put new values into memory that TensorFlow keeps.
        """
        noted = self._noted
        return noted is not None and noted == placement.part_addresses(self)

    def _placed(self, value):
        """Places an eager value of the variable's shape in its layout."""
        value = getattr(value, "_value", value)
        has_shape = tuple(np.shape(value)) == tuple(self.shape)
        if not tf.executing_eagerly() or not has_shape:
            return value
        return tf.cast(placement.place(value, self.layout), self.dtype)

    def numpy(self):
        return placement.read(self)

    def __array__(self, dtype=None, copy=None):
        return np.asarray(placement.read(self), dtype=dtype)


@around
def hook_is_dtensor(original, self, tensor):
    """Recognizes a sharded variable off the mesh, where `_handle` is `None`."""
    return isinstance(tensor, ShardedVariable) or original(self, tensor)


@around
def hook_fetch_layout(original, self, dtensor):
    """Returns the layout of a sharded variable without a read of its value."""
    if isinstance(dtensor, ShardedVariable):
        return dtensor.layout
    return original(self, dtensor)


def _is_read_whole():
    on_mesh = dtensor.get_default_mesh() or placement.current_mesh()
    return tf.executing_eagerly() and on_mesh is None


def is_distributed(variable):
    """Returns whether a Keras variable lies on the devices of a mesh."""
    return isinstance(getattr(variable, "_value", None), dtensor.DVariable)


def relayout(variable, layout):
    """Moves a variable; see `distribution_lib.relayout_variable`."""
    old = variable._value
    shape = tuple(old.shape)
    whole = tuple((0, size) for size in shape)
    if is_distributed(variable) and processes.world_size() == 1:
        parts = placement.local_parts(old)
    else:
        parts = [(0, whole, _whole(old))]

    def part_of(part):
        return placement.part_from(parts, part)

    if layout is None:
        new = _plain(variable, part_of(whole), old.trainable)
    else:
        placed = placement.place_parts(
            part_of, shape, layout.backend_layout, own_memory.tensor_of
        )
        # Of a layer that is frozen now, a tape would never watch a new value
        # that is not trainable.
        new = _sharded(variable, placed, old.trainable, layout)
    # Optimizers identify their variables by this id.
    new._unique_id = old._unique_id
    variable._layout = layout
    variable._value = new


def _whole(value):
    """Returns the whole value; a plain one must be equal in every process."""
    if isinstance(value, dtensor.DVariable):
        return placement.read(value)
    value = value.read_value().numpy()
    processes.same_array(value)
    return value


def _sharded(variable, value, trainable, layout):
    mesh = placement.layout_of(value).mesh
    with tf.init_scope(), dtensor.default_mesh(mesh):
        new = ShardedVariable(value, trainable=trainable, name=variable.name)
    # A graph captures the handle: `ops/sequence.py` finds the layout there.
    new.handle._tensor_layout = layout
    new.note_memory()
    return new


def _plain(variable, value, trainable):
    with placement.off_mesh():
        return tf.Variable(value, trainable=trainable, name=variable.name)


@contextlib.contextmanager
def exporting(model):
    """Context in which a model is exported as a program for one device.

    Afterwards the variables get their old values back, so functions compiled
    for the mesh stay valid.
    """
    kept = [
        (v, v._value, v._layout) for v in model.variables if is_distributed(v)
    ]
    if not kept:
        yield
        return
    before = distribution()
    try:
        for variable, value, _ in kept:
            variable._value = _plain(
                variable, placement.read(value), value.trainable
            )
            variable._layout = None
        set_distribution(None)
        yield
    finally:
        set_distribution(before)
        for variable, value, layout in kept:
            variable._value, variable._layout = value, layout


@around
def hook_initialize(original, self, value):
    """Gives each device its part of a variable's initial value."""
    current, on_mesh = distribution(), placement.current_mesh() is not None
    if isinstance(value, tf.Variable) or (
        current is None and self._layout is None
    ):
        # As the global random state, which may be made while a step is traced.
        with placement.off_mesh() if on_mesh else contextlib.nullcontext():
            return original(self, value)
    with placement.off_mesh():
        # On the host, so that the values are the same as on one device.
        # The host's memory holds the whole variable meanwhile.
        value = value() if callable(value) else value
        if placement.is_dtensor(value):
            value = placement.read(value)
        value = tf.cast(value, self._dtype)
        self._shape = self._validate_shape(value.shape)
        if self._layout is None:
            self._layout = current.get_variable_layout(self)
        value = np.asarray(value)
        processes.same_array(value)
        placed = placement.place(
            value, self._layout.backend_layout, own_memory.tensor_of
        )
    self._value = _sharded(self, placed, self.trainable, self._layout)


@around
def hook_initialize_with_initializer(original, self, initializer):
    """Makes only the parts of a variable that a file has a value for."""
    layout, current = self._layout, distribution()
    if layout is None and current is not None:
        layout = current.get_variable_layout(self)
    if not expected_values.is_expected(self, initializer, layout):
        original(self, initializer)
        return
    dtype = np.dtype(tf.as_dtype(self._dtype).as_numpy_dtype)
    self._layout = layout
    with placement.off_mesh():
        placed = placement.place_parts(
            lambda part: own_memory.zeros([b - a for a, b in part], dtype),
            self._shape,
            layout.backend_layout,
        )
    self._value = _sharded(self, placed, self.trainable, layout)


@around
def hook_identify(original, self, /, *args, **kwargs):
    """Asks which variable it is, without a need of its value."""
    with expected_values.not_needed():
        return original(self, *args, **kwargs)


@around
def hook_direct_assign(original, self, value):
    """Gives an assigned value the layout of its variable."""
    _follow_to_mesh(self)
    if not is_distributed(self):
        return original(self, value)
    value = getattr(value, "_value", value)
    if tf.executing_eagerly() and not placement.is_dtensor(value):
        with tf.device("CPU:0"):
            value = tf.cast(value, self._value.dtype)
        processes.same_array(np.asarray(value))
    elif not tf.executing_eagerly():
        value = tf.cast(value, self._value.dtype)
    self._value.assign(value)


def _follow_to_mesh(variable):
    """Moves a variable to the mesh on which it is about to change.

    It was made outside of the distribution, such as a metric of a custom loop.
    Each device would change a variable that is not on the mesh once.
    """
    mesh = placement.current_mesh()
    value = variable._value
    if mesh is None or (is_distributed(variable) and value.layout.mesh == mesh):
        return
    layout = TensorLayout(
        [None] * len(value.shape), placement.device_mesh(mesh)
    )
    functions.run_before(lambda: relayout(variable, layout))


@around
def hook_write(original, self, /, *args, **kwargs):
    """Refuses to change a plain `tf.Variable` on a mesh.

    Each device would change it once.
    """
    if placement.current_mesh() is None or isinstance(self, dtensor.DVariable):
        return original(self, *args, **kwargs)
    raise NotImplementedError(
        f"The `tf.Variable` {self.name!r} changes in a function that runs on "
        "the devices of a mesh: each of them would change it once. Use a "
        "`keras.Variable` instead, or change it outside of the function."
    )


@around
def hook_skip(original, self, /, *args, **kwargs):
    """Refuses draws of a `tf.random.Generator` on a mesh.

    Each device would draw other numbers, and change its state once.
    """
    if placement.current_mesh() is None:
        return original(self, *args, **kwargs)
    raise NotImplementedError(
        "A `tf.random.Generator` draws in a function that runs on the devices "
        "of a mesh: each of them would draw other numbers. Use `keras.random` "
        "with a `keras.random.SeedGenerator`."
    )


@around
def hook_convert_to_numpy(original, x):
    """Puts the parts of a DTensor together on the host."""
    if isinstance(x, Variable):
        expected_values.draw(x)
    value = getattr(x, "_value", x)
    if placement.is_dtensor(value):
        return placement.read(value)
    return original(x)
