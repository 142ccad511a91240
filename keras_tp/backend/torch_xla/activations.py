"""Activations whose gradients torch_xla computes wrongly.

Its gradient of `elu` reads the input where it has to read the output: -2.15 in
place of 0.04 at -3.15, in torch_xla 2.9. `celu` and `selu` are made of it. Here
they are written in operations whose gradients are correct.
"""

import torch

from keras_tp.backend.torch_xla import placement

# The constants of torch.
_SELU_ALPHA = 1.6732632423543772848170429916717
_SELU_SCALE = 1.0507009873554804934193349852946


class Functions:
    """Functions of `torch.nn.functional`."""

    def elu(original, input, alpha=1.0, inplace=False):
        if not placement.is_xla(input):
            return original(input, alpha, inplace)
        return _elu(input, alpha, 1.0)

    def celu(original, input, alpha=1.0, inplace=False):
        if not placement.is_xla(input):
            return original(input, alpha, inplace)
        return _elu(input, alpha, 1 / alpha)

    def selu(original, input, inplace=False):
        if not placement.is_xla(input):
            return original(input, inplace)
        return _SELU_SCALE * _elu(input, _SELU_ALPHA, 1.0)


def _elu(x, alpha, input_scale):
    # Above 0, this branch must not overflow: its gradient would be nan.
    below = alpha * torch.expm1(input_scale * x.clamp(max=0))
    return torch.where(x > 0, x, below)
