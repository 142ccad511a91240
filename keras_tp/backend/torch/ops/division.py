"""Gradients of quotients."""

import torch
from torch.distributed.tensor import DTensor

from keras_tp.backend.hooks import around
from keras_tp.backend.torch import placement


@around
def hook_divide(original, x, divisor, **kwargs):
    """All-reduces the gradient of a quotient before it is used twice.

    The weights of experts are divided by their sum. Where experts are split,
    the gradient of the weights is a partial sum. DTensor alone all-reduces what
    it gives to the divisor, and again what it gives to the dividend.

    In a compiled step it does so still.
    """
    result = original(x, divisor, **kwargs)
    if (
        not torch.compiler.is_compiling()
        and isinstance(divisor, DTensor)
        and divisor.requires_grad
        and result.requires_grad
    ):
        result.register_hook(placement.settled)
    return result
