"""Writes into caches of keys and values, on each process's shard."""

import functools

from keras.src import tree
from keras.src.backend.torch import core
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Replicate

from keras_tp.backend.torch import local_tensors
from keras_tp.backend.torch import placement


def slice_update(original):
    """Wraps `keras.src.backend.torch.core.slice_update`.

    A dim that is written in full, such as the heads, stays split as in the
    updates or the inputs. DTensor would gather both.
    """

    @functools.wraps(original)
    def replacement(inputs, start_indices, updates):
        inputs = core.convert_to_tensor(inputs)
        updates = core.convert_to_tensor(updates)
        if not isinstance(inputs, DTensor) and not isinstance(updates, DTensor):
            return original(inputs, start_indices, updates)
        mesh = local_tensors.mesh_of((updates, inputs), {})
        placements = [
            _common(a, b, inputs.shape, updates.shape)
            for a, b in zip(
                local_tensors.placements_of(updates, mesh),
                local_tensors.placements_of(inputs, mesh),
            )
        ]
        starts = tree.map_structure(placement.to_full, start_indices)
        local = original(
            _part(inputs, mesh, placements),
            starts,
            _part(updates, mesh, placements),
        )
        return DTensor.from_local(
            local,
            mesh,
            placements,
            run_check=False,
            shape=inputs.shape,
            stride=inputs.contiguous().stride(),
        )

    return replacement


def _common(of_updates, of_inputs, shape, written):
    """Returns a placement in which each process writes into its own shard."""
    for placed in (of_updates, of_inputs):
        if placed.is_shard() and shape[placed.dim] == written[placed.dim]:
            return placed
    return Replicate()


def _part(tensor, mesh, placements):
    if not isinstance(tensor, DTensor):
        tensor = placement.replicate(tensor, mesh)
    return tensor.redistribute(placements=placements).to_local()
