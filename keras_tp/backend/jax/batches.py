"""Places batches on the devices of one or several processes."""

import math
import weakref

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.experimental import sparse
from keras.src import tree
from keras.src.distribution.distribution_lib import distribution

from keras_tp.backend.jax import arrays
from keras_tp.backend.jax import processes
from keras_tp.backend.processes import data_shards

# Distribution -> shape of a global batch -> sharding. Each step asks for it.
_shardings = weakref.WeakKeyDictionary()


def sharding_of(shape, current):
    """Returns the sharding that a distribution gives to a batch.

    Args:
        shape: Tuple of ints, shape of the global batch.
        current: The `Distribution`.
    """
    known = _shardings.setdefault(current, {})
    if shape not in known:
        known[shape] = fitting_sharding(shape, current.get_data_layout(shape))
    return known[shape]


def fitting_sharding(shape, layout):
    """Returns the sharding of a batch: replicated if it does not divide.

    Replication does not change the results: every device computes the whole
    batch, and the mean is over the same samples.

    Args:
        shape: Tuple of ints, shape of the global batch.
        layout: `TensorLayout` or `jax.sharding.Sharding`.
    """
    sharding = getattr(layout, "backend_layout", layout)
    if not isinstance(sharding, jax.sharding.NamedSharding):
        return sharding
    sizes = sharding.mesh.shape
    for size, axis in zip(shape, sharding.spec):
        names = axis if isinstance(axis, tuple) else (axis,) if axis else ()
        if size % math.prod(sizes[n] for n in names):
            return _replicated(sharding)
    return sharding


def _replicated(sharding):
    spec = jax.sharding.PartitionSpec()
    return jax.sharding.NamedSharding(sharding.mesh, spec)


def is_sparse(array):
    """Returns whether an array is sparse, such as a `BCOO`."""
    return isinstance(array, sparse.JAXSparse)


def replicate_sparse(array, layout):
    """Returns a sparse array, replicated over the devices of a mesh.

    A sparse array is a list of entries, so the batch axis cannot split it by
    rows. The results do not change, as for a batch that does not divide.
    """
    sharding = getattr(layout, "backend_layout", layout)
    if isinstance(sharding, jax.sharding.NamedSharding):
        sharding = _replicated(sharding)
    return jax.tree_util.tree_map(
        lambda part: (
            part
            if arrays.is_spread(part)
            else arrays.from_whole(part, sharding)
        ),
        array,
    )


def parts_of(current):
    """Returns the `Parts` of each batch that the processes receive.

    `None` if every process receives the global batch.
    """
    if current is None or getattr(current, "auto_shard_dataset", True):
        return None
    mesh = current.device_mesh.backend_mesh
    if mesh.is_multi_process and current.batch_dim_name in mesh.axis_names:
        dim = mesh.axis_names.index(current.batch_dim_name)
        owners = np.vectorize(lambda device: device.process_index)(mesh.devices)
        along = np.indices(owners.shape)[dim]
        return data_shards.find_parts(
            [along[owners == i] for i in range(processes.world_size())],
            owners.shape[dim],
        )
    return None


def place(batch, current, is_part=False):
    """Places a batch on the devices, as a distribution lays it out.

    Args:
        batch: Structure of arrays: the global batch, the same in every
            process, or this process's part.
        current: The `Distribution`.
        is_part: Boolean. Whether `batch` is a part. Defaults to `False`.
    """
    parts = parts_of(current) if is_part else None

    def place_one(array):
        if array is None or arrays.is_spread(array):
            return array
        if is_sparse(array):
            layout = current.get_data_layout(array.shape)
            return replicate_sparse(array, layout)
        if not isinstance(array, jax.Array):
            array = np.asarray(array)
        shape = array.shape
        if parts is not None and shape:
            shape = (shape[0] * parts.count, *shape[1:])
        sharding = sharding_of(shape, current)
        if parts is not None and shape:
            return jax.make_array_from_process_local_data(
                sharding, array, shape
            )
        return arrays.from_whole(array, sharding)

    return tree.map_structure(place_one, batch)


def place_given(batch, current):
    """Places a global batch or a part of one, as the distribution expects.

    A collective if processes receive parts.
    """
    parts = parts_of(current)
    if parts is None or all(
        array is None or arrays.is_spread(array)
        for array in tree.flatten(batch)
    ):
        return place(batch, current)
    batch, is_part = data_shards.fit_together(
        batch, processes.gather, parts, _gather_rows
    )
    return place(batch, current, is_part)


def distribute_data(original, data, layouts=None):
    """Places batches, such as those of `train_on_batch`."""
    current = distribution()
    if current is None:
        return original(data, layouts)
    return place_given(data, current)


def predict_on_batch(original, self, x):
    """Places the batch, which Keras passes to the step as it is."""
    current = distribution()
    if current is not None and processes.world_size() > 1:
        x = place_given(x, current)
    return original(self, x)


def agree_on_length(original, self, *args, **kwargs):
    """Makes all processes agree on the number of batches."""
    current = distribution()
    original(self, *args, **kwargs)
    if current is None:
        return
    self.data_adapter = data_shards.AgreedLength(
        self.data_adapter, processes.gather, parts_of(current) is not None
    )
    self._num_batches = self.data_adapter.num_batches


def in_step(original, self, current):
    """Yields the batches of an epoch in step with the other processes."""
    for batch, is_part in data_shards.in_step(
        self.data_adapter.get_jax_iterator(),
        processes.gather,
        parts_of(current),
        _gather_rows,
    ):
        yield place(batch, current, is_part)


def _gather_rows(array, longest):
    """Returns the arrays of all processes, padded at the end. A collective."""
    padded = np.zeros((longest, *array.shape[1:]), array.dtype)
    padded[: array.shape[0]] = array
    return list(multihost_utils.process_allgather(padded))
