"""Runs elementwise optimizers on the shards."""

import contextlib
import functools

import torch
from keras.src.backend.common.stateless_scope import in_stateless_scope
from torch.distributed.tensor import DTensor

from keras_tp.backend.torch import local_tensors
from keras_tp.backend.torch import placement

# Bytes of the gradients that are updated together, if they are several. On CPUs
# the tensors of an update then stay in the cache; on GPUs each group costs a
# dozen launches.
_MOST_TOGETHER = 16 * 2**20
_MOST_TOGETHER_ON_CPU = 2 * 2**20


def update_shards(original):
    """Wraps `TorchParallelOptimizer._backend_update_step`.

    The optimizers of this class (Adam and its variants, SGD, RMSprop, Adagrad,
    Adadelta, Lion) update each element of a variable from the same element of
    its gradient and its slots. So they run on the shards directly, and DTensor
    does not dispatch a dozen operations for each variable. Clipping by norm and
    other steps that need whole variables, or all of them, run before this.
    Optimizers such as Lamb or Muon are of another class.

    If the slots of a variable are split further than the variable, each process
    updates its slots' part, and the parts are gathered afterwards (ZeRO-1).
    """

    @functools.wraps(original)
    def _backend_update_step(self, grads, trainable_variables, learning_rate):
        if (
            torch.compiler.is_compiling()
            or in_stateless_scope()
            or not _alike(self)
        ):
            return original(self, grads, trainable_variables, learning_rate)
        placements = [_update_placements(v) for v in trainable_variables]
        grads = [
            gradient
            if placed is None
            else local_tensors.local_part(
                gradient, variable._value.device_mesh, placed
            )
            for gradient, variable, placed in zip(
                grads, trainable_variables, placements
            )
        ]
        with (
            _as_parts(self.variables, [_placements(v) for v in self.variables]),
            _as_parts(trainable_variables, placements),
        ):
            for group in _groups(grads):
                original(
                    self,
                    [grads[i] for i in group],
                    [trainable_variables[i] for i in group],
                    learning_rate,
                )

    return _backend_update_step


def _groups(grads):
    """Returns lists of the positions of gradients that are updated together.

    Keras computes an update of all variables at once, and keeps several tensors
    of the size of all gradients meanwhile.
    """
    groups, size = [], 0
    for position, gradient in enumerate(grads):
        nbytes = gradient.numel() * gradient.itemsize
        most = _MOST_TOGETHER
        if gradient.device.type == "cpu":
            most = _MOST_TOGETHER_ON_CPU
        if not groups or size + nbytes > most:
            groups.append([])
            size = 0
        groups[-1].append(position)
        size += nbytes
    return groups


def _alike(optimizer):
    """Returns whether all slots are split like their variables' updates.

    Slots that were made outside of the distribution are not split.
    """
    variables = optimizer._trainable_variables
    for slots in vars(optimizer).values():
        if not isinstance(slots, list) or slots is optimizer._variables:
            continue
        if slots is variables or len(slots) != len(variables):
            continue
        for slot, variable in zip(slots, variables):
            if _placements(slot) != _update_placements(variable):
                return False
    return True


def _placements(variable):
    value = getattr(variable, "_value", None)
    return value.placements if isinstance(value, DTensor) else None


def _update_placements(variable):
    """Returns the placements of a variable's slots; `None` if it is plain."""
    own = _placements(variable)
    slots = getattr(variable, "_slot_layout", None)
    if own is None or slots is None:
        return own
    return placement.as_placement(slots).placements


@contextlib.contextmanager
def _as_parts(variables, placements):
    """Sets variables to the local parts that this process updates.

    On exit, parts that are smaller than the shards are gathered.
    """
    values = [variable._value for variable in variables]
    try:
        for variable, value, placed in zip(variables, values, placements):
            if placed is not None:
                variable._value = local_tensors.local_part(
                    value, value.device_mesh, placed
                )
        yield
        for variable, value, placed in zip(variables, values, placements):
            if placed is not None and tuple(placed) != tuple(value.placements):
                updated = local_tensors.wrap_parts(
                    variable._value, value.device_mesh, placed, value.shape
                ).redistribute(placements=value.placements)
                value._local_tensor.copy_(updated._local_tensor)
    finally:
        for variable, value in zip(variables, values):
            variable._value = value
