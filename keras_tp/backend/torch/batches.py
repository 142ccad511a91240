"""Splits batches over the mesh.

By default every process gets the same global batch, from any kind of data, and
keeps its slice. With `auto_shard_dataset=False` and a mesh axis that splits
batches, every process gets only its part, as in `keras.distribution`: the
global batch is the concatenation of the parts, in the order of that axis.
Processes of one model group, which differ in other axes only, get equal parts.
"""

import collections
import hashlib
import warnings

import numpy as np
import torch
from keras.src import tree
from keras.src.backend.torch import core
from keras.src.distribution.distribution_lib import distribution
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Replicate
from torch.distributed.tensor import Shard

from keras_tp.backend.processes import progress
from keras_tp.backend.torch import placement
from keras_tp.backend.torch import processes

_SAME_DATA = (
    "torch feeds every process the same global batch: give all of them the "
    "same data in the same order, and the same seed; or give each its own "
    "part under a distribution with `auto_shard_dataset=False` and an axis "
    "that splits batches."
)
_SAME_RANDOMNESS = (
    "Call `keras.utils.set_random_seed` with the same seed in every process, "
    "and draw random numbers in all processes or in none."
)


class Parts(collections.namedtuple("Parts", ["mesh", "dim", "by_process"])):
    """The part of each batch that each process gets.

    Args:
        mesh: `torch.distributed.device_mesh.DeviceMesh`.
        dim: Int, the dim of the mesh that splits batches.
        by_process: List of ints, the index of each process's part.
    """

    @property
    def count(self):
        """Number of parts in a batch."""
        return self.mesh.size(self.dim)

    @property
    def way_out(self):
        """Sentence on which part each process has to hold."""
        return (
            "With `auto_shard_dataset=False` each process is given its own "
            f"part of every batch, one of {self.count}, and the processes of "
            "one model group are given the same. Parts by process "
            "(`distribution.data_shard_id`, where the axis of batches is the "
            f"first of the mesh): {dict(enumerate(self.by_process))}."
        )


def parts_of(current):
    """Returns the `Parts` that processes get under a distribution.

    Args:
        current: A `Distribution`, or `None`.

    Returns:
        `Parts`; `None` if every process gets the global batch.
    """
    if current is None or getattr(current, "auto_shard_dataset", True):
        return None
    mesh = current.device_mesh.backend_mesh
    if mesh is None or current.batch_dim_name not in mesh.mesh_dim_names:
        return None
    dim = mesh.mesh_dim_names.index(current.batch_dim_name)
    by_process = np.empty(mesh.size(), int)
    by_process[mesh.mesh.numpy().flatten()] = np.indices(mesh.shape)[
        dim
    ].flatten()
    return Parts(mesh, dim, by_process.tolist())


def distribute_batch(data):
    """Returns a batch with each array split by the current distribution.

    A collective if processes get parts.

    Args:
        data: Structure of arrays: the global batch, or this process's part of
            it. Arrays that the batch axis does not split stay as they are.
    """
    current = distribution()
    if getattr(current, "batch_dim_name", None) is None:
        return data
    parts = parts_of(current)
    if parts is None:
        return tree.map_structure(lambda a: batch_input(a, current), data)
    if any(isinstance(leaf, DTensor) for leaf in tree.flatten(data)):
        # `Batches` has joined the parts.
        return data
    return _put_together(data, parts, current)


def batch_input(array, current):
    """Returns one array of a global batch as a tensor under a distribution."""
    if isinstance(array, DTensor) or not _is_array(array):
        return array
    layout = current.get_data_layout(tuple(array.shape))
    return split_batch(array, placement.as_placement(layout))


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


class Batches:
    """Iterates over the batches of an epoch, in step with other processes.

    Args:
        batches: Iterable of batches, or of this process's parts of them.
        current: The `Distribution` that splits them.
    """

    def __init__(self, batches, current):
        self._batches = batches
        self._current = current

    def __iter__(self):
        processes.same_everywhere(
            "random states", processes.rng_bytes(), _SAME_RANDOMNESS
        )
        # Made now, as without keras_tp, because a DataLoader draws a seed.
        return self._in_step(iter(self._batches))

    def _in_step(self, iterator):
        parts = parts_of(self._current)
        progress.source()
        batch = next(iterator, None)
        _compare(batch, parts)
        while True:
            given = batch
            if parts is not None:
                given = _put_together(batch, parts, self._current)
            if given is None:
                progress.end_of_data()
                if parts is None:
                    # Raises if others have more batches, and wait for this one.
                    processes.gather_by_process(None, "the end of the data")
                return
            progress.batch()
            yield given
            progress.source()
            # Other processes may have more batches.
            batch = None if batch is None else next(iterator, None)


class AgreedLength:
    """A data adapter with the number of batches of all processes.

    Making one is a collective.

    Args:
        adapter: A `DataAdapter` of Keras.
        current: The `Distribution` that splits its batches.

    Raises:
        ValueError: on every process, if they get global batches and their
            numbers of batches differ, or if only some get parts.
    """

    def __init__(self, adapter, current):
        self._adapter = adapter
        given = (parts_of(current) is not None, adapter.num_batches)
        found = processes.gather_by_process(given, "the number of batches")
        lengths = [length for _, length in found]
        if len({is_part for is_part, _ in found}) > 1 or (
            not given[0] and len(set(lengths)) > 1
        ):
            raise ValueError(
                "The processes of this run hold different batches. "
                f"{_SAME_DATA} Received, by process, whether it holds a part "
                "(`auto_shard_dataset=False`), and how many batches: "
                f"{dict(enumerate(found))}"
            )
        # Without a number, an epoch lasts until every process has ended.
        self.num_batches = None if None in lengths else max(lengths)

    def __getattr__(self, name):
        return getattr(self._adapter, name)


def _compare(batch, parts):
    """Raises unless the first batches match; warns if all parts are equal."""
    held = None
    if batch is not None:
        held = [
            core.convert_to_numpy(leaf).tobytes() if _is_array(leaf) else leaf
            for leaf in tree.flatten(batch)
        ]
    if parts is None:
        processes.same_everywhere("batches", held, _SAME_DATA)
        return
    digests = processes.same_everywhere(
        "batches", held, parts.way_out, parts.by_process
    )
    if len(set(digests)) == 1 and processes.is_first():
        warnings.warn(
            "All processes begin with the same batch, as if it was a part of "
            f"a larger one. {parts.way_out} If each process is given the "
            "global batch, leave `auto_shard_dataset=True`.",
            stacklevel=2,
        )


def _put_together(batch, parts, current):
    """Returns the global batch, from the parts of all processes.

    A collective: processes exchange the lengths and dtypes of their parts. The
    parts themselves move only if their lengths differ.

    Args:
        batch: Structure of arrays; `None` if this process has no more batches.
        parts: `Parts`.
        current: The `Distribution`.

    Returns:
        Structure of DTensors; `None` if no process has more batches.

    Raises:
        ValueError: on every process, if the parts do not fit together.
    """
    rows, kind = -1, ""
    if batch is not None:
        rows = _rows(batch)
        kind = str(tree.map_structure(_kind, batch))
    digest = hashlib.sha256(kind.encode()).digest()[:7]
    held = processes.gather_numbers((rows, int.from_bytes(digest, "big")))
    all_rows = [count for count, _ in held]
    if max(all_rows) < 0:
        return None
    if (
        len({digest for count, digest in held if count >= 0}) > 1
        or len(set(zip(parts.by_process, all_rows))) > parts.count
    ):
        described = processes.gather_by_process(
            (rows, kind), "the kind of a batch"
        )
        raise ValueError(
            "The parts of a batch do not fit together. They may differ in "
            "length between model groups, and in nothing else: pad or cut "
            f"their other dims to equal sizes. {parts.way_out} Received, by "
            "process, the length (-1: the data has ended), and the other dims "
            f"and dtypes: {dict(enumerate(described))}"
        )
    if len(set(all_rows)) == 1:
        return tree.map_structure(lambda a: _joined(a, parts, current), batch)
    return _gathered(batch, parts, current)


def _joined(array, parts, current):
    """Returns parts of equal length as one DTensor, without communication."""
    if not _is_array(array):
        return array
    joined = DTensor.from_local(
        core.convert_to_tensor(array),
        parts.mesh,
        [
            Shard(0) if dim == parts.dim else Replicate()
            for dim in range(parts.mesh.ndim)
        ],
        run_check=False,
    )
    layout = current.get_data_layout(tuple(joined.shape))
    placed = placement.as_placement(layout)
    if joined.placements == placed.placements:
        return joined
    return joined.redistribute(placed.mesh, placed.placements)


def _gathered(batch, parts, current):
    """Gathers parts of different lengths, such as an epoch's last batch.

    The result is the same as if every process had got the global batch.
    """
    own = parts.by_process[processes.index()]
    if parts.by_process.index(own) != processes.index():
        batch = None
    held = processes.gather_by_process(
        tree.map_structure(_on_host, batch), "the rows of a batch"
    )
    first = [parts.by_process.index(index) for index in range(parts.count)]

    def whole(*arrays):
        if not _is_array(arrays[0]):
            return arrays[0]
        array = batch_input(np.concatenate(arrays), current)
        if isinstance(array, DTensor):
            return array
        return placement.replicate(core.convert_to_tensor(array), parts.mesh)

    return tree.map_structure(
        whole, *[held[index] for index in first if held[index] is not None]
    )


def _on_host(leaf):
    if not _is_array(leaf):
        return leaf
    return core.convert_to_numpy(leaf)


def _rows(batch):
    return next((a.shape[0] for a in tree.flatten(batch) if _is_array(a)), 0)


def _kind(leaf):
    if not _is_array(leaf):
        return type(leaf).__name__
    dtype = str(leaf.dtype).removeprefix("torch.")
    return f"{tuple(leaf.shape[1:])} {dtype}"


def _is_array(leaf):
    return isinstance(leaf, (torch.Tensor, np.ndarray)) and leaf.ndim > 0
