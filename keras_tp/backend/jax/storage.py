"""Variables that are stored as arrays of another shape.

A `jax.Array` has parts of one size, each without a gap. So a dim that the
devices do not divide is stored with zeros after its end, and a dim of several
blocks, such as queries, keys and values, as two dims: (blocks, size of each).
The value gets the variable's shape where it is read, and the stored one where
it is assigned: layers, losses and files see the variable's shape. XLA keeps a
value without its zeros split; for blocks see `blocks.py`. The train state of
Keras's trainer, which passes between compiled steps, has the stored arrays.
"""

import contextlib
import functools
import threading
import weakref

import jax
import jax.numpy as jnp
import numpy as np
from keras import optimizers
from keras.src.backend.common.stateless_scope import get_stateless_scope
from keras.src.backend.common.stateless_scope import in_stateless_scope
from keras.src.backend.jax import core
from keras.src.random.seed_generator import SeedGenerator

from keras_tp.backend.fully_sharded import as_it_is
from keras_tp.backend.hooks import around
from keras_tp.backend.jax import arrays
from keras_tp.backend.jax import fully_sharded
from keras_tp.backend.saving import expected_values

# Updates that compute each element by itself, or from sums over all of them.
_ELEMENTWISE = {
    optimizer.update_step
    for optimizer in (
        optimizers.SGD,
        optimizers.RMSprop,
        optimizers.Adam,
        optimizers.Adadelta,
        optimizers.Adagrad,
        optimizers.Adamax,
        optimizers.Nadam,
        optimizers.Ftrl,
        optimizers.Lion,
        optimizers.Lamb,
    )
}


class _State(threading.local):
    # Whether `variable.value` is the stored array: of no variable, of those in
    # blocks, or of all.
    padded = blocks = False


_state = _State()
# id of a tensor -> (weak reference to it, the tensor with a dim of blocks, dim)
_noted = {}
# id of a tensor -> (weak reference to it, the variable that it transposes)
_transposed = {}


def shape_of(variable):
    """Returns the stored shape of a variable; `None` if it is the own one."""
    layout = getattr(variable, "_layout", None)
    # The cheap tests are first: `fit` asks for every variable. Layouts of Keras
    # have neither attribute.
    if not (getattr(layout, "uneven", False) or getattr(layout, "blocks", ())):
        return None
    shape = variable._shape
    if shape is None:
        return None
    found = shape_in(variable, layout)
    return None if found == tuple(shape) else found


def block_dim(variable):
    """Returns the dim of a variable that is stored in blocks, or `None`."""
    # Layouts of Keras have no such attribute.
    layout = getattr(variable, "_layout", None)
    return next(iter(getattr(layout, "blocks", ())), None)


def to_stored(value, shape):
    """Returns a value in a stored shape: with blocks, or zeros at the ends."""
    if value.shape == tuple(shape):
        return value
    if value.ndim != len(shape):
        return jnp.reshape(value, shape)
    ends = [(0, size - own) for size, own in zip(shape, value.shape)]
    return jnp.pad(value, ends)


def from_stored(value, shape):
    """Returns a stored value in the shape of its variable."""
    if value.ndim != len(shape):
        return jnp.reshape(value, shape)
    return value[tuple(map(slice, shape))]


def product(multiply, kernel):
    """Returns a product; the backward pass gathers its kernel again.

    Otherwise JAX keeps each gathered kernel from the forward pass, and a device
    holds the gathered kernels of all layers. XLA decides how early it gathers a
    kernel, and considers the memory of the device.

    Args:
        multiply: Function of the kernel.
        kernel: Keras variable, or a tensor. It may be the transpose of a
            variable that was noted by `note_transpose`.
    """
    variable, transpose = kernel, None
    noted, source = _transposed.get(id(kernel), (None, None))
    if noted is not None and noted() is kernel:
        variable, transpose = source, jnp.transpose
    if not in_stateless_scope() or not fully_sharded.is_gathered(variable):
        return multiply(kernel)
    with stored(), as_it_is():
        part = core.convert_to_tensor(variable)
    if not isinstance(part, jax.core.Tracer):
        return multiply(kernel)

    @jax.checkpoint
    def gather_and_multiply(part):
        part = fully_sharded.pinned(variable, part)
        whole = fully_sharded.gathered(variable, part)
        if whole.shape != tuple(variable.shape):
            whole = from_stored(whole, variable.shape)
        return multiply(whole if transpose is None else transpose(whole))

    return gather_and_multiply(fully_sharded.pinned(variable, part))


def note_transpose(result, variable):
    """Remembers that a tensor is the transpose of a variable."""
    key = id(result)
    reference = weakref.ref(result, lambda _: _transposed.pop(key, None))
    _transposed[key] = reference, variable


@contextlib.contextmanager
def stored(padded=True):
    """Context in which `variable.value` is the stored array.

    Args:
        padded: Boolean. Whether this is so for variables with padding too.
            Defaults to `True`.
    """
    before = _state.padded, _state.blocks
    _state.padded, _state.blocks = padded, True
    try:
        yield
    finally:
        _state.padded, _state.blocks = before


def note(tensor, in_blocks, dim):
    """Remembers the form of a tensor in which a dim is (blocks, size)."""
    key = id(tensor)
    reference = weakref.ref(tensor, lambda _: _noted.pop(key, None))
    _noted[key] = reference, in_blocks, dim


def noted(tensor):
    """Returns the noted form of a tensor and its dim, or two `None`s."""
    key = id(tensor)
    reference, in_blocks, dim = _noted.get(key, (lambda: None, None, None))
    return (in_blocks, dim) if reference() is tensor else (None, None)


def as_stored(original, self, *args, **kwargs):
    """Calls a function of Keras's trainer that takes values as they are."""
    with stored():
        return original(self, *args, **kwargs)


def is_stored(variable, layout):
    """Returns whether the stored shape is another, now or in a layout."""
    target = shape_in(variable, layout)
    return shape_of(variable) is not None or target != tuple(variable.shape)


def shape_in(variable, layout):
    """Returns the shape that a variable is stored in under a layout."""
    shape = tuple(variable.shape)
    # Layouts of Keras store every tensor in its own shape.
    find = getattr(layout, "stored_shape", tuple)
    return find(shape)


def moved(variable, layout):
    """Returns the value of a variable, stored as another layout needs it."""
    value, sharding = variable._value, layout.backend_layout
    shape, target = tuple(variable.shape), shape_in(variable, layout)
    if value.sharding.device_set != sharding.device_set:
        return arrays.place(_moved(value, shape, target), sharding)
    move = functools.partial(_moved, shape=shape, target=target)
    return jax.jit(move, out_shardings=sharding)(value)


def _moved(value, shape, target):
    return to_stored(from_stored(value, shape), target)


@around
def hook_scope(original, self, state_mapping=None, *args, **kwargs):
    """Takes stored arrays for values of variables.

    Those in blocks get their stored shape here: a loop of one's own begins with
    values in the shapes of their variables, and an update changes some of them
    to stored ones, which are then used with the others.
    """
    own, other = [], []
    for variable, value in state_mapping or ():
        shape, given = shape_of(variable), np.shape(value)
        in_blocks = shape is not None and block_dim(variable) is not None
        is_other = given == shape or in_blocks and given == variable._shape
        (other if is_other else own).append((variable, value, shape))
    original(self, [entry[:2] for entry in own], *args, **kwargs)
    for variable, value, shape in other:
        # Keras would compare the shapes.
        value = core.convert_to_tensor(value, dtype=variable.dtype)
        self.state_mapping[id(variable)] = to_stored(value, shape)


class Variable:
    """Methods of `JaxVariable`."""

    def _maybe_autocast(original, self, value):
        # Keras calls this with the value that `variable.value` returns.
        if isinstance(value, (int, float)):
            # An initializer may return a number. Before the variable has a
            # value, Keras takes it for a tensor.
            value = core.convert_to_tensor(value, dtype=self.dtype)
        cast = fully_sharded.gathered(self, original(self, value))
        if value.shape != shape_of(self):
            return cast
        dim = block_dim(self)
        if _state.padded if dim is None else _state.blocks:
            return cast
        in_stored_shape = cast
        value = from_stored(in_stored_shape, self._shape)
        if dim is not None:
            note(value, in_stored_shape, dim)
        return value

    def assign(original, self, value):
        if _is_in_place(self, value):
            # A result of a step, which `fit` gives back to the model.
            self._value = value
            return value
        shape = shape_of(self)
        if shape is None:
            return original(self, value)
        value = self._convert_to_tensor(value, dtype=self._dtype)
        if value.shape not in (shape, self._shape):
            # Raises.
            return original(self, value)
        kept = to_stored(value, shape)
        if in_stateless_scope():
            get_stateless_scope().add_update((self, kept))
        else:
            self._direct_assign(kept)
        return value

    def _direct_assign(original, self, value):
        shape = shape_of(self)
        if shape is not None:
            value = to_stored(value, shape)
        original(self, value)

    def _validate_shape(original, self, shape):
        # Keras takes the shape of a variable from its first value.
        if tuple(shape) == shape_of(self):
            return self._shape
        return original(self, shape)

    def _initialize_with_initializer(original, self, initializer):
        self._initialize_layout()
        shape = shape_of(self)
        if expected_values.is_expected(self, initializer, self._layout):
            self._value = arrays.zeros(
                shape or self._shape,
                jnp.dtype(self._dtype),
                self._layout.backend_layout,
            )
            return
        if shape is None:
            original(self, initializer)
            return

        def initial():
            value = initializer(self._shape, dtype=self._dtype)
            return to_stored(value, shape)

        if isinstance(getattr(initializer, "seed", None), SeedGenerator):
            # Its state must not change while JAX traces.
            self._direct_assign(initial())
        else:
            self._value = jax.jit(
                initial, out_shardings=self._layout.backend_layout
            )()


def _gradient(gradient, variable, in_blocks):
    shape = shape_of(variable)
    if in_blocks and shape is not None and block_dim(variable) is not None:
        return to_stored(gradient, shape)
    if gradient.shape == shape:
        return from_stored(gradient, variable.shape)
    return gradient


def _is_in_place(variable, value):
    """Returns whether a variable can hold an array as it is."""
    layout = getattr(variable, "_layout", None)
    return (
        layout is not None
        and not in_stateless_scope()
        and isinstance(value, jax.Array)
        and not isinstance(value, jax.core.Tracer)
        and value.dtype == variable._dtype
        and value.shape == (shape_of(variable) or variable._shape)
        and value.sharding == getattr(layout, "backend_layout", layout)
    )


@around
def hook_apply_gradients(original, self, grads, trainable_variables):
    """Gives the gradients of stored arrays the shape of their variables.

    Gradients of variables in blocks get the stored shape instead, so that they
    are split as values and slots are. An optimizer that asks for shapes gets
    the variables' own.
    """
    # Keras makes zeros of the variables' shapes for accumulated gradients.
    by_element = (
        type(self).update_step in _ELEMENTWISE
        and not self.gradient_accumulation_steps
    )
    grads = [
        _gradient(g, v, in_blocks=by_element)
        for g, v in zip(grads, trainable_variables)
    ]
    with as_it_is():
        if not by_element:
            return original(self, grads, trainable_variables)
        with stored(padded=False):
            return original(self, grads, trainable_variables)
