"""Splits batches over the mesh.

Every process receives the same global batch, from any kind of data, and keeps
its slice; or its part, as `processes/data_shards.py` describes.
"""

import functools

import numpy as np
import torch
from keras.src import tree
from keras.src.backend.torch import core
from keras.src.distribution.distribution_lib import distribution
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Replicate
from torch.distributed.tensor import Shard

from keras_tp.backend.processes import data_shards
from keras_tp.backend.torch import placement
from keras_tp.backend.torch import processes

_SAME_RANDOMNESS = (
    "Call `keras.utils.set_random_seed` with the same seed in every process, "
    "and draw random numbers in all processes or in none."
)


def parts_of(current):
    """Returns the `Parts` of batches that a distribution gives to processes.

    Args:
        current: A `Distribution`, or `None`.

    Returns:
        `Parts`; `None` if every process receives the global batch.
    """
    if current is None or getattr(current, "auto_shard_dataset", True):
        return None
    mesh = current.device_mesh.backend_mesh
    if mesh is None or current.batch_dim_name not in mesh.mesh_dim_names:
        return None
    dim = mesh.mesh_dim_names.index(current.batch_dim_name)
    along = np.empty(mesh.size(), int)
    along[mesh.mesh.numpy().flatten()] = np.indices(mesh.shape)[dim].flatten()
    return data_shards.find_parts(along[:, None].tolist(), mesh.size(dim))


def distribute_batch(data):
    """Returns a batch with each array split by the current distribution.

    A collective if processes receive parts.

    Args:
        data: Structure of arrays: the global batch, or this process's part of
            it. Arrays that the batch axis does not split stay as they are.
    """
    current = distribution()
    if getattr(current, "batch_dim_name", None) is None:
        return data
    parts = parts_of(current)
    if parts is None:
        return tree.map_structure(lambda a: _slice(a, current), data)
    if any(isinstance(leaf, DTensor) for leaf in tree.flatten(data)):
        # `_InStep` has joined the parts.
        return data
    return _joined(
        *data_shards.fit_together(data, processes.gather, parts, _gather_rows),
        current,
    )


def split_batch(array, placed):
    """Returns this process's part of an array as a DTensor.

    Args:
        array: Array or plain tensor, the same in every process.
        placed: `Placement`. An array that it cannot split evenly, such as the
            last batch of an epoch, is left whole.
    """
    if not placed.is_split:
        return array
    for dim, placed_on_dim in enumerate(placed.placements):
        if placed_on_dim.is_shard():
            size = array.shape[placed_on_dim.dim]
            if size % placed.mesh.size(dim):
                return array
    return placement.from_full(core.convert_to_tensor(array), placed)


def hook_epoch_iterator(original):
    """Makes all processes agree on the batches of an epoch."""

    @functools.wraps(original)
    def __init__(self, *args, **kwargs):
        current = distribution()
        original(self, *args, **kwargs)
        if current is None or processes.world_size() == 1:
            return
        self.data_adapter = _InStep(self.data_adapter, current)
        self._num_batches = self.data_adapter.num_batches

    return __init__


class _InStep(data_shards.AgreedLength):
    """A data adapter whose batches are in step with the other processes."""

    def __init__(self, adapter, current):
        is_part = parts_of(current) is not None
        super().__init__(adapter, processes.gather, is_part)
        self._current = current

    def get_torch_dataloader(self):
        self._batches = self._adapter.get_torch_dataloader()
        return self

    def __iter__(self):
        processes.same_everywhere(
            "random states",
            processes.random_state()["cpu"].tobytes(),
            _SAME_RANDOMNESS,
        )
        # Made now, as without keras_tp, because a DataLoader draws a seed.
        return self._placed(iter(self._batches))

    def _placed(self, batches):
        parts = parts_of(self._current)
        for batch, is_part in data_shards.in_step(
            batches, processes.gather, parts, _gather_rows
        ):
            yield (
                batch
                if parts is None
                else _joined(batch, is_part, self._current)
            )


def _is_array(leaf):
    return isinstance(leaf, (torch.Tensor, np.ndarray)) and leaf.ndim > 0


def _slice(array, current):
    """Returns one array of a global batch as a tensor under a distribution."""
    if isinstance(array, DTensor) or not _is_array(array):
        return array
    layout = current.get_data_layout(tuple(array.shape))
    return split_batch(array, placement.as_placement(layout))


def _joined(batch, is_part, current):
    """Returns a global batch as DTensors, from parts without communication.

    Args:
        batch: Structure of arrays.
        is_part: Boolean. Whether they are this process's part.
        current: The `Distribution`.
    """
    mesh = current.device_mesh.backend_mesh
    axis = mesh.mesh_dim_names.index(current.batch_dim_name)
    placements = [
        Shard(0) if dim == axis else Replicate() for dim in range(mesh.ndim)
    ]

    def join(array):
        if not _is_array(array):
            return array
        if not is_part:
            array = _slice(array, current)
            if isinstance(array, DTensor):
                return array
            return placement.replicate(core.convert_to_tensor(array), mesh)
        array = DTensor.from_local(
            core.convert_to_tensor(array), mesh, placements, run_check=False
        )
        layout = current.get_data_layout(tuple(array.shape))
        return array.redistribute(
            placements=placement.as_placement(layout).placements
        )

    return tree.map_structure(join, batch)


def _gather_rows(array, longest):
    """Returns the arrays of all processes, padded at the end. A collective."""
    padded = np.zeros((longest, *array.shape[1:]), array.dtype)
    padded[: array.shape[0]] = array
    return processes.gather_array(padded)
