"""What of Keras takes symbolic tensors only while a model is traced.

Each row is a method that fails on a `KerasTensor`, or does not come to a
Keras operation, although what it computes is a matter of Keras operations.
"""

import contextlib
import re
import string

import keras
from keras.src import ops
from keras.src.ops.core import Cond
from keras.src.ops.numpy import Einsum
from keras.src.ops.numpy import GetItem
from keras.src.ops.numpy import Ndim
from keras.src.utils.backend_utils import DynamicBackend

# How a framework turns a KerasTensor into a tensor of its own: without these
# `constant * KerasTensor` reaches `KerasTensor.__rmul__`.
_CONVERSIONS = ("__jax_array__", "__array__", "__tf_tensor__")


@contextlib.contextmanager
def replaced():
    """Puts the replacements in place for a while."""
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
    """What a preprocessing layer finds in its `backend`: Keras's operation.

    It takes functions and modules of the backend itself, so that it can be
    part of a pipeline of data.
    """
    found = getattr(ops, name, None)
    return found or _backend_attribute(dynamic, name)


def _branch(cond, pred, true_fn, false_fn):
    """What `Cond` does whose predicate is known: one of the two."""
    return true_fn() if pred else false_fn()


def _shape_of_item(get_item, x, key):
    """Keras takes no symbolic `x[1:]`, only `x[1:,]`, which is the same."""
    key = key if isinstance(key, (int, tuple, list)) else (key,)
    return _shape_of_items(get_item, x, key)


def _shape_of_product(einsum, *operands):
    """Keras takes no symbolic einsum with capital letters."""
    letters = sorted(set(re.findall("[a-zA-Z]", einsum.subscripts)))
    small = str.maketrans(dict(zip(letters, string.ascii_lowercase)))
    alike = Einsum(einsum.subscripts.translate(small))
    return _shape_of_small_letters(alike, *operands)


def _rank(ndim, x):
    """The rank of a symbolic tensor is a number; Keras makes a tensor of it."""
    return len(x.shape)


_backend_attribute = DynamicBackend.__getattr__
_shape_of_items = GetItem.compute_output_spec
_shape_of_small_letters = Einsum.compute_output_spec
# Methods that are others meanwhile.
_REPLACED = (
    (DynamicBackend, "__getattr__", _operation_of_backend),
    (Cond, "call", _branch),
    (Einsum, "compute_output_spec", _shape_of_product),
    (GetItem, "compute_output_spec", _shape_of_item),
    (Ndim, "compute_output_spec", _rank),
)
