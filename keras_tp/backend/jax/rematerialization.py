"""Rematerialization that repeats no sum over the devices.

The backward pass would repeat a forward pass with its all-reduces. So their
results get a name, and the forward pass keeps what has this name.
"""

import threading

import jax
from jax.ad_checkpoint import checkpoint_name
from keras.src.backend.jax import core
from keras.src.distribution.distribution_lib import TensorLayout

_NAME = "keras_tp_sum"


class _State(threading.local):
    # How many functions of `keras.remat` are being traced, one in another.
    depth = 0


_state = _State()


def keeping(f, plain):
    """See `backend.rematerialization.row`."""

    def marked(*args, **kwargs):
        _state.depth += 1
        try:
            return f(*args, **kwargs)
        finally:
            _state.depth -= 1

    return jax.checkpoint(
        marked, policy=jax.checkpoint_policies.save_only_these_names(_NAME)
    )


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
