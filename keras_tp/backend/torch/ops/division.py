"""Gradients of quotients."""

import functools

import torch
from torch.distributed.tensor import DTensor

from keras_tp.backend.torch import placement


def hook_divide(original):
    """Wraps a division; its gradient is all-reduced before it is used twice.

    The weights of experts are divided by their sum. Where experts are split,
    the gradient of the weights is a partial sum. DTensor alone all-reduces what
    it gives to the divisor, and again what it gives to the dividend.

    In a compiled step it does so still.
    """

    @functools.wraps(original)
    def divide(x, divisor, **kwargs):
        if torch.compiler.is_compiling():
            # torch's compiler does not know the function by its own name while
            # another has it.
            return torch.div(x, divisor, **kwargs)
        result = original(x, divisor, **kwargs)
        if (
            isinstance(divisor, DTensor)
            and divisor.requires_grad
            and result.requires_grad
        ):
            result.register_hook(placement.settled)
        return result

    return divide
