"""Rematerialization that repeats no sum over the devices.

What is computed again in the backward pass would be summed again. So the sums
have a name, and are kept.
"""

import functools
import threading

import jax
from jax.ad_checkpoint import checkpoint_name
from keras.src.backend.common.keras_tensor import any_symbolic_tensors
from keras.src.backend.jax import core
from keras.src.distribution.distribution_lib import TensorLayout
from keras.src.distribution.distribution_lib import distribution

from keras_tp.backend.hooks import around

_NAME = "keras_tp_sum"


class _State(threading.local):
    # Whether a function is traced that is computed again.
    depth = 0


_state = _State()


@around
def hook_remat(original, f):
    """Keeps sums; all else is computed again, as by `original`."""
    again = original(f)

    def marked(*args, **kwargs):
        _state.depth += 1
        try:
            return f(*args, **kwargs)
        finally:
            _state.depth -= 1

    keeping = jax.checkpoint(
        marked, policy=jax.checkpoint_policies.save_only_these_names(_NAME)
    )

    @functools.wraps(again)
    def remat(*args, **kwargs):
        if any_symbolic_tensors(args, kwargs):
            # A plan is made from the operations inside.
            return f(*args, **kwargs)
        run = again if distribution() is None else keeping
        return run(*args, **kwargs)

    return remat


def summed(result, kernel, *dims):
    """Names the result of an operation that sums over dims of a kernel.

    Args:
        result: Array.
        kernel: The operand; only a variable has a layout.
        dims: Ints, the dims of the kernel that the operation sums over.
    """
    if not _state.depth or not isinstance(kernel, core.Variable):
        return result
    layout = kernel._layout
    if not isinstance(layout, TensorLayout):
        return result
    if all(layout.axes[dim] is None for dim in dims):
        return result
    return checkpoint_name(result, _NAME)


class Functions:
    """Functions of `keras.src.backend.jax.numpy`, beside those of `blocks`."""

    def einsum(original, subscripts, *operands, **kwargs):
        result = original(subscripts, *operands, **kwargs)
        if len(operands) != 2 or "->" not in subscripts:
            return result
        inputs, output = subscripts.split("->")
        of_kernel = inputs.split(",")[1].strip()
        if len(of_kernel) != len(operands[1].shape):
            # An ellipsis.
            return result
        dims = [i for i, dim in enumerate(of_kernel) if dim not in output]
        return summed(result, operands[1], *dims)

    def take(original, x, indices, axis=None):
        result = original(x, indices, axis=axis)
        return result if axis is None else summed(result, x, axis)
