"""Variables with a split dim that the devices do not divide.

A `jax.Array` has parts of one size. So such a variable is stored with zeros
after the end of the dim. Its value is cut where it is read, and padded where
it is assigned: layers, losses, optimizers and files see the variable's shape.
XLA keeps the cut value split. The train state of Keras's trainer, which passes
between compiled steps, has the stored arrays.
"""

import contextlib
import functools
import threading

import jax
import jax.numpy as jnp
import numpy as np
from keras.src.backend.common.stateless_scope import get_stateless_scope
from keras.src.backend.common.stateless_scope import in_stateless_scope
from keras.src.backend.jax import core
from keras.src.random.seed_generator import SeedGenerator

from keras_tp.backend.hooks import around
from keras_tp.backend.jax import arrays


class _State(threading.local):
    # Whether `variable.value` is the stored array.
    stored = False


_state = _State()


def shape_of(variable):
    """Returns the padded shape of a variable; `None` if it has no padding."""
    # Layouts of Keras have no such attribute.
    layout = getattr(variable, "_layout", None)
    if not getattr(layout, "uneven", False):
        return None
    shape = variable._shape
    padded = None if shape is None else layout.stored_shape(shape)
    return None if padded == tuple(shape or ()) else padded


def pad(value, shape):
    """Returns a value with zeros up to a shape."""
    ends = [(0, size - own) for size, own in zip(shape, value.shape)]
    return jnp.pad(value, ends)


def cut(value, shape):
    """Returns a value without the zeros that `pad` added to this shape."""
    return value[tuple(map(slice, shape))]


@contextlib.contextmanager
def stored():
    """Context in which `variable.value` is the stored array."""
    before, _state.stored = _state.stored, True
    try:
        yield
    finally:
        _state.stored = before


def as_stored(original, self, *args, **kwargs):
    """Calls a function of Keras's trainer that takes values as they are."""
    with stored():
        return original(self, *args, **kwargs)


def is_stored(variable, layout):
    """Returns whether a variable has padding now or in another layout."""
    target = shape_in(variable, layout)
    return shape_of(variable) is not None or target != tuple(variable.shape)


def shape_in(variable, layout):
    """Returns the shape that a variable is stored in under a layout."""
    shape = tuple(variable.shape)
    uneven = getattr(layout, "uneven", False)
    return layout.stored_shape(shape) if uneven else shape


def moved(variable, layout):
    """Returns the value of a variable, stored as another layout needs it."""
    value, sharding = variable._value, layout.backend_layout
    shape, target = tuple(variable.shape), shape_in(variable, layout)
    if value.sharding.device_set != sharding.device_set:
        return arrays.place(_moved(value, shape, target), sharding)
    move = functools.partial(_moved, shape=shape, target=target)
    return jax.jit(move, out_shardings=sharding)(value)


def _moved(value, shape, target):
    return pad(cut(value, shape), target)


@around
def hook_scope(original, self, state_mapping=None, *args, **kwargs):
    """Takes stored arrays for values of variables."""
    whole, padded = [], []
    for variable, value in state_mapping or ():
        is_padded = np.shape(value) == shape_of(variable)
        (padded if is_padded else whole).append((variable, value))
    original(self, whole, *args, **kwargs)
    for variable, value in padded:
        # Keras would compare the shapes.
        value = core.convert_to_tensor(value, dtype=variable.dtype)
        self.state_mapping[id(variable)] = value


class Variable:
    """Methods of `JaxVariable`."""

    def _maybe_autocast(original, self, value):
        # Keras calls this with the value that `variable.value` returns.
        if value.shape == shape_of(self) and not _state.stored:
            value = cut(value, self._shape)
        return original(self, value)

    def assign(original, self, value):
        shape = shape_of(self)
        if shape is None:
            return original(self, value)
        value = self._convert_to_tensor(value, dtype=self._dtype)
        if value.shape not in (shape, self._shape):
            # Raises.
            return original(self, value)
        kept = value if value.shape == shape else pad(value, shape)
        if in_stateless_scope():
            get_stateless_scope().add_update((self, kept))
        else:
            self._direct_assign(kept)
        return value

    def _direct_assign(original, self, value):
        shape = shape_of(self)
        if shape is not None and value.shape != shape:
            value = pad(value, shape)
        original(self, value)

    def _validate_shape(original, self, shape):
        # Keras takes the shape of a variable from its first value.
        if tuple(shape) == shape_of(self):
            return self._shape
        return original(self, shape)

    def _initialize_with_initializer(original, self, initializer):
        self._initialize_layout()
        shape = shape_of(self)
        if shape is None:
            original(self, initializer)
            return

        def padded():
            return pad(initializer(self._shape, dtype=self._dtype), shape)

        if isinstance(getattr(initializer, "seed", None), SeedGenerator):
            # Its state must not change while JAX traces.
            self._direct_assign(padded())
        else:
            self._value = jax.jit(
                padded, out_shardings=self._layout.backend_layout
            )()


@around
def hook_apply_gradients(original, self, grads, trainable_variables):
    """Cuts the gradients of stored arrays."""
    grads = [
        g if g.shape != shape_of(v) else cut(g, v.shape)
        for g, v in zip(grads, trainable_variables)
    ]
    return original(self, grads, trainable_variables)
