"""Batches as DTensors over the devices of several processes."""

import numpy as np
import tensorflow as tf
from keras.src import tree
from keras.src.distribution.distribution_lib import distribution

from keras_tp.backend.hooks import around
from keras_tp.backend.processes import data_shards
from keras_tp.backend.tensorflow import boundary
from keras_tp.backend.tensorflow import placement
from keras_tp.backend.tensorflow import processes


def parts_of(current):
    """Returns the `Parts` of batches that a distribution gives to processes.

    `None` if every process is given the global batch.
    """
    if processes.world_size() == 1 or getattr(
        current, "auto_shard_dataset", True
    ):
        return None
    mesh = current.device_mesh
    if current.batch_dim_name not in mesh.axis_names:
        return None
    dim = list(mesh.axis_names).index(current.batch_dim_name)
    # Devices are listed process by process, equally many for each.
    along = np.indices(mesh.shape)[dim].flatten()
    count = processes.world_size()
    return data_shards.find_parts(
        np.split(along, count) if along.size > 1 else [along] * count,
        mesh.shape[dim],
    )


def place(batch, current):
    """Places the global batch, or this process's part of it, as DTensors.

    A collective if the distribution gives parts to processes.
    """
    parts = parts_of(current)
    is_part = False
    leaves = [leaf for leaf in tree.flatten(batch) if leaf is not None]
    if parts is not None and not all(map(placement.is_dtensor, leaves)):
        batch, is_part = data_shards.fit_together(
            tree.map_structure(_on_host, batch),
            processes.gather,
            parts,
            _gather_rows,
        )
    return _placed(batch, current, parts if is_part else None)


def _placed(batch, current, parts):
    mesh, axis = current.device_mesh.backend_mesh, current.batch_dim_name
    part = (0, 1)
    if parts is not None:
        part = parts.by_process[processes.index()], parts.count
    return tree.map_structure(
        lambda leaf: boundary.place_batch(leaf, mesh, axis, part), batch
    )


class InStep:
    """Places the batches of an epoch, in step with the other processes.

    The dataset has global batches, or parts of them.
    """

    def __init__(self, dataset, current):
        self._dataset = dataset
        self._current = current
        self.element_spec = dataset.element_spec

    def __iter__(self):
        parts = parts_of(self._current)
        batches = (
            tree.map_structure(_on_host, batch) for batch in self._dataset
        )
        for batch, is_part in data_shards.in_step(
            batches, processes.gather, parts, _gather_rows
        ):
            yield _placed(batch, self._current, parts if is_part else None)


@around
def hook_epoch_iterator(original, self, /, *args, **kwargs):
    """Makes all processes agree on the number of batches."""
    current = distribution()
    original(self, *args, **kwargs)
    if current is None or processes.world_size() == 1:
        return
    self.data_adapter = data_shards.AgreedLength(
        self.data_adapter, processes.gather, parts_of(current) is not None
    )
    self._num_batches = self.data_adapter.num_batches
    self._distributed_dataset = InStep(self._distributed_dataset, current)


def _on_host(leaf):
    if leaf is None or isinstance(leaf, tf.experimental.Optional):
        return None
    return leaf if data_shards.is_sparse(leaf) else np.asarray(leaf)


def _gather_rows(array, longest):
    """Returns the list of the arrays of all processes."""
    return processes.gather(array, "the rows of a batch")
