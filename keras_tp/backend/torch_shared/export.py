"""Exports models whose variables are split."""

import contextlib

import torch
from keras.src.backend.torch import core
from keras.src.distribution.distribution_lib import distribution
from keras.src.distribution.distribution_lib import set_distribution


@contextlib.contextmanager
def exporting(whole, model):
    """Context in which a model is exported as a program for one device.

    torch traces plain tensors only, so each process holds the whole model while
    it is exported. Afterwards the variables get their old values back.

    Args:
        whole: Function of a variable. Returns its value as a plain tensor, or
            `None` if it is one.
        model: Keras model.
    """
    found = [(variable, whole(variable)) for variable in model.variables]
    kept = [
        (variable, value, variable._value, variable._layout)
        for variable, value in found
        if value is not None
    ]
    if not kept:
        yield
        return
    before = distribution()
    try:
        for variable, value, _, _ in kept:
            variable._value = torch.nn.Parameter(
                value, requires_grad=variable.trainable
            )
            variable._layout = None
        set_distribution(None)
        # A call of the model enters its distribution, but not its devices.
        with core.device_scope(core.DEFAULT_DEVICE):
            yield
    finally:
        set_distribution(before)
        for variable, _, value, layout in kept:
            variable._value, variable._layout = value, layout
        # Layers track the old values again, and the whole ones are freed.
        model.named_parameters()
