"""Rematerialization that repeats no sum over the devices.

The backward pass would repeat a forward pass with its all-reduces. So their
results get a name, and the forward pass keeps what has this name.

`jax.checkpoint` alone traces arguments such as `training`, and lets the new
values of variables, such as the state of random numbers in `Dropout`, escape
from its trace. So these arguments are left out of the trace, and the new values
are results of the function, which are assigned outside of it.
"""

import threading

import jax
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from keras.src.backend.jax import core
from keras.src.distribution.distribution_lib import TensorLayout

from keras_tp.backend import rematerialization

_NAME = "keras_tp_sum"


class _State(threading.local):
    # How many functions of `keras.remat` are being traced, one in another.
    depth = 0


_state = _State()


def keeping(f, plain):
    """See `backend.rematerialization.row`."""

    def remat(*args, **kwargs):
        traced, whole = rematerialization.part(args, kwargs, _is_array)
        passes = []

        def marked(traced):
            args, kwargs = whole(traced)
            _state.depth += 1
            try:
                with rematerialization.Pass() as noted:
                    result = f(*args, **kwargs)
            finally:
                _state.depth -= 1
            passes.append(noted)
            return result, noted.values, noted.losses

        policy = jax.checkpoint_policies.save_only_these_names(_NAME)
        result, values, losses = jax.checkpoint(marked, policy=policy)(traced)
        rematerialization.apply(f, passes[-1], values, losses)
        return result

    return remat


def _is_array(x):
    return isinstance(x, (jax.Array, np.ndarray))


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
