"""Adds up gradients over the replicas, several in one launch.

Where the batch is split, the gradient of a variable is a partial sum in each
process. As in torch's `DistributedDataParallel` (Li et al. 2020), gradients
are collected in buckets. A full one is launched while the backward pass goes
on, and the end of the backward pass waits for all.
"""

import weakref

import torch
import torch.distributed._functional_collectives as functional
from torch.distributed.tensor import DTensor

from keras_tp.backend.torch import local_tensors
from keras_tp.backend.torch import placement

# Bytes of a bucket, as in `DistributedDataParallel`.
BUCKET_SIZE = 25 * 2**20
# Number of a backward pass under way -> its `_Buckets`, which end with it.
_buckets = weakref.WeakValueDictionary()


def waits(gradient, parameter):
    """Returns whether a partial gradient is left to `collect`.

    Args:
        gradient: DTensor.
        parameter: DTensor, the leaf whose gradient it is.
    """
    return (
        parameter.grad is None
        and placement.summed(gradient.placements) == parameter.placements
        and _group_dim(gradient) is not None
    )


def collect(parameter):
    """Adds up the gradient that a backward pass has left in a parameter.

    Args:
        parameter: DTensor whose `grad` may be partial.
    """
    gradient = parameter.grad
    if not isinstance(gradient, DTensor) or _group_dim(gradient) is None:
        return
    number = torch._C._current_graph_task_id()
    buckets = _buckets.get(number)
    if buckets is None:
        buckets = _buckets[number] = _Buckets()
        engine = torch.autograd.Variable._execution_engine
        engine.queue_callback(buckets.finish)
    buckets.add(parameter, gradient)


def _group_dim(gradient):
    """Returns the mesh dim over which a gradient is a sum.

    Returns `None` if there is no such dim, or if there are several: DTensor has
    one all-reduce for these.
    """
    dims = [
        dim
        for dim, placed in enumerate(gradient.placements)
        if placed.is_partial()
    ]
    if len(dims) != 1 or not gradient.placements[dims[0]].is_partial("sum"):
        return None
    return dims[0]


class _Buckets:
    """The gradients of one backward pass that are added up.

    Processes run the same backward pass, so they launch the same buckets in
    the same order.
    """

    def __init__(self):
        # (mesh, mesh dim, dtype) -> list of (reference of parameter, gradient).
        self._open = {}
        # List of (reference of parameter, (mesh, placements, shape), result).
        self._launched = []

    def add(self, parameter, gradient):
        """Adds a gradient to its bucket, and launches a full bucket."""
        key = gradient.device_mesh, _group_dim(gradient), gradient.dtype
        bucket = self._open.setdefault(key, [])
        bucket.append((weakref.ref(parameter), gradient))
        size = sum(held._local_tensor.nbytes for _, held in bucket)
        if size >= BUCKET_SIZE:
            self._launch(key)

    def finish(self):
        """Launches the last buckets, and sets the `grad` of each parameter."""
        for key in list(self._open):
            self._launch(key)
        for reference, (mesh, placements, shape), part in self._launched:
            part = functional.wait_tensor(part)
            parameter = reference()
            if parameter is not None:
                parameter.grad = local_tensors.wrap_parts(
                    part, mesh, placements, shape
                )

    def _launch(self, key):
        mesh, dim, _ = key
        bucket = self._open.pop(key)
        # Collectives need contiguous memory.
        parts = [held._local_tensor.contiguous() for _, held in bucket]
        parts = functional.all_reduce_coalesced(parts, "sum", (mesh, dim))
        for (reference, gradient), part in zip(bucket, parts):
            placements = placement.summed(gradient.placements)
            result = mesh, placements, gradient.shape
            self._launched.append((reference, result, part))
            parameter = reference()
            if parameter is not None:
                # The partial gradient is not needed any more.
                parameter.grad = None
