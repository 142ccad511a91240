"""Exports models whose variables are split."""

from keras.src.distribution.distribution_lib import distribution
from keras.src.distribution.distribution_lib import set_distribution
from torch.distributed.tensor import DTensor

from keras_tp.backend.hooks import around
from keras_tp.backend.torch import variables


@around
def hook_export(original, self, /, *args, **kwargs):
    """Exports a program that runs on one device.

    torch traces plain tensors only: each process holds the whole model
    meanwhile.
    """
    kept = [
        (v, v._layout) for v in self.variables if isinstance(v._value, DTensor)
    ]
    if not kept:
        return original(self, *args, **kwargs)
    before = distribution()
    try:
        for variable, _ in kept:
            variables.move(variable, None)
            variable._layout = None
        set_distribution(None)
        return original(self, *args, **kwargs)
    finally:
        set_distribution(before)
        for variable, layout in kept:
            variable._layout = layout
            variables.move(variable, layout)
