"""Exports models whose variables are split."""

from keras.src.distribution.distribution_lib import distribution
from keras.src.distribution.distribution_lib import set_distribution
from torch.distributed.tensor import DTensor

from keras_tp.backend.hooks import around
from keras_tp.backend.torch import placement
from keras_tp.backend.torch import variables


@around
def hook_export(original, self, /, *args, **kwargs):
    """Exports a program that runs on one device.

    torch traces plain tensors only, so each process holds the whole model while
    it is exported. Afterwards the variables get their old values back.
    """
    kept = [
        (v, v._value, v._layout)
        for v in self.variables
        if isinstance(v._value, DTensor)
    ]
    if not kept:
        return original(self, *args, **kwargs)
    before = distribution()
    try:
        for variable, value, _ in kept:
            variables.set_value(variable, placement.to_full(value.detach()))
            variable._layout = None
        set_distribution(None)
        return original(self, *args, **kwargs)
    finally:
        set_distribution(before)
        for variable, value, layout in kept:
            variable._value, variable._layout = value, layout
        # Layers track the old values again, and the whole ones are freed.
        self.named_parameters()
