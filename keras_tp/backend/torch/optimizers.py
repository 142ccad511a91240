"""Optimizers that update each number by itself, run on the shards."""

import contextlib
import functools

import torch
from keras.src.backend.common.stateless_scope import in_stateless_scope
from torch.distributed.tensor import DTensor

from keras_tp.backend.torch import parts


def update_shards(original):
    """Wraps `TorchParallelOptimizer._backend_update_step`.

    The optimizers of this class (Adam and its kin, SGD, RMSprop, Adagrad,
    Adadelta, Lion) compute each number of a variable from the same place of
    its gradient and its slots. So they run on the shards as they are, and
    DTensor need not dispatch a dozen operations for each variable. What needs
    all of a variable or of all variables, as clipping by norm does, has been
    done by then, and optimizers such as Lamb or Muon are of another class.
    """

    @functools.wraps(original)
    def _backend_update_step(self, grads, trainable_variables, learning_rate):
        if (
            torch.compiler.is_compiling()
            or in_stateless_scope()
            or not _alike(self)
        ):
            return original(self, grads, trainable_variables, learning_rate)
        grads = [
            _part(gradient, variable._value)
            for gradient, variable in zip(grads, trainable_variables)
        ]
        with _as_shards([*trainable_variables, *self.variables]):
            original(self, grads, trainable_variables, learning_rate)

    return _backend_update_step


def _alike(optimizer):
    """Returns whether all slots are split as their variables are.

    Slots that were made outside of the distribution are whole.
    """
    variables = optimizer._trainable_variables
    for slots in vars(optimizer).values():
        if not isinstance(slots, list) or slots is optimizer._variables:
            continue
        if len(slots) != len(variables):
            continue
        for slot, variable in zip(slots, variables):
            if _placements(slot) != _placements(variable):
                return False
    return True


def _placements(variable):
    value = getattr(variable, "_value", None)
    return value.placements if isinstance(value, DTensor) else None


def _part(gradient, value):
    """Returns this process's part of a gradient, split as its variable is."""
    if not isinstance(value, DTensor):
        return gradient
    return parts.local_part(gradient, value.device_mesh, value.placements)


@contextlib.contextmanager
def _as_shards(variables):
    """Makes the values of variables this process's shards for a while."""
    values = [(variable, variable._value) for variable in variables]
    try:
        for variable, value in values:
            if isinstance(value, DTensor):
                variable._value = value._local_tensor
        yield
    finally:
        for variable, value in values:
            variable._value = value
