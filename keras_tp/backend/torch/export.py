"""Exports models whose variables are split."""

import contextlib

from keras.src.distribution.distribution_lib import distribution
from keras.src.distribution.distribution_lib import set_distribution
from torch.distributed.tensor import DTensor

from keras_tp.backend.torch import placement
from keras_tp.backend.torch import variables


@contextlib.contextmanager
def exporting(model):
    """Context in which a model is exported as a program for one device.

    torch traces plain tensors only, so each process holds the whole model while
    it is exported. Afterwards the variables get their old values back.
    """
    kept = [
        (v, v._value, v._layout)
        for v in model.variables
        if isinstance(v._value, DTensor)
    ]
    if not kept:
        yield
        return
    before = distribution()
    try:
        for variable, value, _ in kept:
            variables.set_value(variable, placement.to_full(value.detach()))
            variable._layout = None
        set_distribution(None)
        yield
    finally:
        set_distribution(before)
        for variable, value, layout in kept:
            variable._value, variable._layout = value, layout
        # Layers track the old values again, and the whole ones are freed.
        model.named_parameters()
