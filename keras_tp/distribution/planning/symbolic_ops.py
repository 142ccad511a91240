"""Replaces Keras methods while a model is traced on symbolic tensors.

Each row is a method that fails on a `KerasTensor`, or that does not call the
Keras operations that could compute its result.
"""

import contextlib
import re
import string

import keras
from keras.src import ops
from keras.src.ops.core import Cond
from keras.src.ops.nn import AdaptiveAveragePool
from keras.src.ops.nn import AdaptiveMaxPool
from keras.src.ops.numpy import Einsum
from keras.src.ops.numpy import GetItem
from keras.src.ops.numpy import Ndim
from keras.src.utils.backend_utils import DynamicBackend

# Methods by which a framework converts a `KerasTensor`. Without them,
# `constant * KerasTensor` reaches `KerasTensor.__rmul__`.
_CONVERSIONS = ("__jax_array__", "__array__", "__tf_tensor__")


@contextlib.contextmanager
def replaced():
    """Returns a context in which the replacements are in place."""
    with contextlib.ExitStack() as stack:
        for owner, name, replacement in _REPLACED:
            stack.callback(setattr, owner, name, vars(owner)[name])
            setattr(owner, name, replacement)
        for name in _CONVERSIONS:
            if name in vars(keras.KerasTensor):
                method = vars(keras.KerasTensor)[name]
                stack.callback(setattr, keras.KerasTensor, name, method)
                delattr(keras.KerasTensor, name)
        yield


def _operation_of_backend(dynamic, name):
    """Returns the Keras operation for an attribute of a layer's `backend`.

    Preprocessing layers call functions of a backend directly, so that they can
    run in a data pipeline.
    """
    found = getattr(ops, name, None)
    return found or _backend_attribute(dynamic, name)


def _branch(cond, pred, true_fn, false_fn):
    """Runs one branch of a `Cond`: its predicate is known."""
    return true_fn() if pred else false_fn()


def _shape_of_item(get_item, x, key):
    """Accepts `x[1:]`; Keras accepts only the equal `x[1:,]` if symbolic."""
    key = key if isinstance(key, (int, tuple, list)) else (key,)
    return _shape_of_items(get_item, x, key)


def _shape_of_product(einsum, *operands):
    """Accepts capital letters, which Keras's symbolic einsum does not."""
    letters = sorted(set(re.findall("[a-zA-Z]", einsum.subscripts)))
    small = str.maketrans(dict(zip(letters, string.ascii_lowercase)))
    alike = Einsum(einsum.subscripts.translate(small))
    return _shape_of_small_letters(alike, *operands)


def _shape_of_pooled(pool, inputs):
    """Returns the shape of the result, which Keras's method gets wrong."""
    first, last = inputs.shape[0], inputs.shape[-1]
    if pool.data_format == "channels_last":
        shape = (first, *pool.output_size, last)
    else:
        shape = (first, inputs.shape[1], *pool.output_size)
    return keras.KerasTensor(shape, dtype=inputs.dtype)


def _rank(ndim, x):
    """Returns the rank as an int, not as a tensor as Keras does."""
    return len(x.shape)


_backend_attribute = DynamicBackend.__getattr__
_shape_of_items = GetItem.compute_output_spec
_shape_of_small_letters = Einsum.compute_output_spec
# Owner, method and replacement.
_REPLACED = (
    (DynamicBackend, "__getattr__", _operation_of_backend),
    (AdaptiveAveragePool, "compute_output_spec", _shape_of_pooled),
    (AdaptiveMaxPool, "compute_output_spec", _shape_of_pooled),
    (Cond, "call", _branch),
    (Einsum, "compute_output_spec", _shape_of_product),
    (GetItem, "compute_output_spec", _shape_of_item),
    (Ndim, "compute_output_spec", _rank),
)
