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


class Functions:
    """Functions of `keras.src.backend.jax.numpy` whose results may be sums.

    `blocks.Functions` has `matmul`.
    """

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
