"""Keeps the batches of an epoch in step across processes.

By default every process receives the same global batch, from any kind of data
source, and its devices take their parts. With `auto_shard_dataset=False` and
an axis that splits batches over processes, each process receives only its own
part, as in `keras.distribution`. The global batch is the concatenation of the
parts in the order of that axis. The processes of one model group differ along
other axes only, and receive the same part.

All of these functions are collectives. `gather(value, what)` gathers a small
value from every process into a list; `what` names the value in errors.
"""

import collections
import functools
import re
import warnings

import keras
import numpy as np
from keras import tree
from keras.src.distribution.distribution_lib import distribution
from keras.src.distribution.distribution_lib import set_distribution
from keras.src.trainers.data_adapters import data_adapter_utils

from keras_tp.backend import current
from keras_tp.backend.hooks import Hook
from keras_tp.backend.processes import consistency
from keras_tp.backend.processes import progress

_SAME_DATA = (
    "Every process must read the same global batches. Give all processes the "
    "same data in the same order, and the same seed. To give each process its "
    "own part of every batch, use a distribution with "
    "`auto_shard_dataset=False` and an axis that splits batches."
)


def table(processes):
    """Returns the rows of a hook table.

    Args:
        processes: The backend's `processes` module, with `world_size`.
    """

    def hook_get_data_adapter(original):
        """Hides the distribution from Keras, which would require `tf.data`.

        Devices take their parts of a batch later.
        """

        @functools.wraps(original)
        def get_data_adapter(*args, **kwargs):
            given = distribution()
            if given is None or processes.world_size() == 1:
                return original(*args, **kwargs)
            set_distribution(None)
            try:
                return original(*args, **kwargs)
            finally:
                set_distribution(given)

        return get_data_adapter

    return [
        Hook(
            "keras.src.trainers.data_adapters",
            "get_data_adapter",
            hook_get_data_adapter,
            "several processes can read data of any kind",
        )
    ]


class Parts(collections.namedtuple("Parts", ["by_process", "axis_size"])):
    """The part of each batch that each process receives.

    Args:
        by_process: List of ints. The index of each process's part.
        axis_size: Int. Size of the mesh axis that splits batches.
    """

    @property
    def count(self):
        """Number of parts in a batch."""
        return max(self.by_process) + 1

    @property
    def way_out(self):
        """Sentence that says which part each process has to provide."""
        return (
            f"With `auto_shard_dataset=False`, each batch has {self.count} "
            "parts. Each process must read its own part, and the processes of "
            "one model group must read the same part. Parts by process: "
            f"{dict(enumerate(self.by_process))}."
        )


def find_parts(coordinates, axis_size):
    """Returns the `Parts` of processes that split the batch axis.

    Args:
        coordinates: List of one list per process: the coordinates of its
            devices along the batch axis of the mesh.
        axis_size: Int. Size of that axis.

    Returns:
        `Parts`, or `None` if every process covers the whole axis, and so
        receives the global batch.

    Raises:
        ValueError: if parts overlap, are not contiguous, or differ in size.
    """
    held = [tuple(sorted(set(own))) for own in coordinates]
    parts = sorted(set(held))
    if len(parts) == 1:
        return None
    size = axis_size // len(parts)
    wanted = [
        tuple(range(start, start + size))
        for start in range(0, axis_size, max(size, 1))
    ]
    if parts != wanted:
        raise ValueError(
            "With `auto_shard_dataset=False`, the devices of a process must be "
            "adjacent along the mesh axis that splits batches, and each "
            "process must have the same number of devices. List the devices of "
            "the mesh process by process. Received coordinates along that "
            f"axis, by process: {dict(enumerate(held))}"
        )
    return Parts([parts.index(own) for own in held], axis_size)


class AgreedLength:
    """A data adapter with a number of batches that all processes agree on.

    Its construction is a collective.

    Args:
        adapter: A `DataAdapter` of Keras.
        gather: Function.
        is_part: Boolean. Whether this process receives parts of batches.

    Raises:
        ValueError: on every process, if only some of them receive parts, or
            if they receive different numbers of global batches.
    """

    def __init__(self, adapter, gather, is_part):
        self._adapter = adapter
        found = gather((is_part, adapter.num_batches), "the number of batches")
        lengths = [length for _, length in found]
        if len({part for part, _ in found}) > 1 or (
            not is_part and len(set(lengths)) > 1
        ):
            raise ValueError(
                "The processes of this run hold different batches. "
                f"{_SAME_DATA} Received by process, as "
                "(`auto_shard_dataset=False`, number of batches): "
                f"{dict(enumerate(found))}"
            )
        # Without a number, an epoch ends when all processes have no more data.
        self.num_batches = None if None in lengths else max(lengths)

    def __getattr__(self, name):
        return getattr(self._adapter, name)


def in_step(batches, gather, parts, gather_rows):
    """Yields the batches of an epoch, compared and in step.

    Args:
        batches: Iterable of global batches, or of parts.
        gather: Function.
        parts: `Parts`, or `None` if every process receives global batches.
        gather_rows: Function of an array and the largest number of rows. It
            returns the list of the arrays of all processes, padded.

    Yields:
        Pairs of a batch and a boolean: whether the batch is this process's
        part of the global batch. If the parts differ in length, or the size of
        the axis does not divide the batch, the parts are concatenated.

    Raises:
        ValueError: on every process, if the first batches or the parts of a
            batch do not match.
    """
    progress.source()
    iterator = iter(batches)
    batch = next(iterator, None)
    _compare_first(batch, gather, parts)
    while True:
        if parts is None:
            if batch is None:
                # Otherwise a process with more batches would wait forever.
                progress.end_of_data()
                gather(None, "the end of the data")
                return
            progress.batch()
            yield batch, False
        else:
            placed = fit_together(batch, gather, parts, gather_rows)
            if placed is None:
                progress.end_of_data()
                return
            progress.batch()
            yield placed
        progress.source()
        # Other processes may have more batches.
        batch = None if batch is None else next(iterator, None)


def fit_together(batch, gather, parts, gather_rows):
    """Returns a pair as `in_step` yields it, or `None` after all data."""
    rows, kind = -1, None
    if batch is not None:
        rows = _rows(batch)
        kind = tree.map_structure(_kind, batch)
    held = gather((rows, kind), "a part of a batch")
    if any(_SPARSE in tree.flatten(kind) for _, kind in held):
        raise ValueError(
            "The parts of a batch must be dense. Convert the data to dense "
            "arrays, or give every process the same global batch with "
            f"`auto_shard_dataset=True`. {parts.way_out} Received by process, "
            f"as (rows, other dims and dtypes): {dict(enumerate(held))}"
        )
    all_rows = [count for count, _ in held]
    if max(all_rows) < 0:
        return None
    kinds = [kind for count, kind in held if count >= 0]
    if (
        len({str(kind) for kind in kinds}) > 1
        or len(set(zip(parts.by_process, all_rows))) > parts.count
    ):
        raise ValueError(
            "The parts of a batch do not fit together. Only their number of "
            "rows may differ, and only between model groups. Pad or cut the "
            f"other dims to equal sizes. {parts.way_out} Received by process, "
            "as (rows, other dims and dtypes), with -1 rows after the end of "
            f"the data: {dict(enumerate(held))}"
        )
    if len(set(all_rows)) == 1 and rows * parts.count % parts.axis_size == 0:
        return batch, True
    if batch is None:
        # This process contributes no rows.
        batch = tree.map_structure(_empty, kinds[0])
    first = [parts.by_process.index(index) for index in range(parts.count)]

    def whole(array):
        if not _is_array(array):
            return array
        found = gather_rows(keras.ops.convert_to_numpy(array), max(all_rows))
        return np.concatenate([found[i][: max(all_rows[i], 0)] for i in first])

    return tree.map_structure(whole, batch), False


def _compare_first(batch, gather, parts):
    """Raises unless the first batches of an epoch match across processes."""
    held = None
    if batch is not None:
        held = [_to_compare(leaf) for leaf in tree.flatten(batch)]
    gather = functools.partial(gather, what="the first batch of an epoch")
    if parts is None:
        consistency.same_everywhere(gather, "batches", held, _SAME_DATA)
        return
    digests = consistency.same_everywhere(
        gather, "batches", held, parts.way_out, parts.by_process
    )
    is_first = current.load("distribution_lib").process_id() == 0
    if len(set(digests)) == 1 and is_first:
        warnings.warn(
            "All processes begin with the same batch, but each of them should "
            f"read a different part. {parts.way_out} If every process reads "
            "the global batch, keep the default `auto_shard_dataset=True`.",
            stacklevel=2,
        )


def _rows(batch):
    return next((a.shape[0] for a in tree.flatten(batch) if _is_array(a)), 0)


_NO_ARRAY = "no array"
_SPARSE = "sparse"


def _kind(leaf):
    """Returns a leaf's dtype and shape without rows, equal in all parts."""
    if is_sparse(leaf):
        return _SPARSE
    if not _is_array(leaf):
        return _NO_ARRAY
    dtype = keras.backend.standardize_dtype(leaf.dtype)
    return f"{tuple(leaf.shape[1:])} {dtype}"


def _empty(kind):
    """Returns an array with 0 rows and the dims and dtype in `kind`."""
    if kind == _NO_ARRAY:
        return None
    shape, _, dtype = kind.rpartition(" ")
    return np.zeros((0, *map(int, re.findall(r"\d+", shape))), dtype)


def is_sparse(leaf):
    """Returns whether a leaf is a sparse JAX, TensorFlow or scipy array."""
    return (
        data_adapter_utils.is_jax_sparse(leaf)
        or data_adapter_utils.is_tensorflow_sparse(leaf)
        or data_adapter_utils.is_scipy_sparse(leaf)
    )


def _to_compare(leaf):
    """Returns the content of a leaf, to compare it between processes."""
    if is_sparse(leaf):
        # The names of the components differ between the libraries.
        names = ("indices", "indptr", "row", "col", "data", "values")
        held = [getattr(leaf, name, None) for name in names]
        return [tuple(leaf.shape), *map(_to_compare, held)]
    if not _is_array(leaf):
        return leaf
    return keras.ops.convert_to_numpy(leaf).tobytes()


def _is_array(leaf):
    return getattr(leaf, "ndim", 0) > 0
