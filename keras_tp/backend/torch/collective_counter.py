"""Counts the collectives of one step in torch's dispatcher."""

from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from keras_tp.backend.torch import batches
from keras_tp.backend.torch import processes
from keras_tp.backend.torch_shared import undone_step

# Start of an operation's name, without "_" -> name that all backends use.
_NAMES = {
    "allreduce": "all_reduce",
    "allgather": "all_gather",
    "reducescatter": "reduce_scatter",
    "alltoall": "all_to_all",
    "sharddimalltoall": "all_to_all",
    "send": "collective_permute",
}
# Not part of a step's communication.
_IGNORED = ("waittensor", "wraptensorautograd", "recv", "barrier")
_IGNORED += ("monitoredbarrier",)


class CollectiveCounter(TorchDispatchMode):
    """Counts the collectives that are dispatched within its context.

    Attributes:
        total: Dict of collective name to a list `[count, bytes]`: the number of
            tensors communicated, and the size of the results on this device.
    """

    def __init__(self):
        super().__init__()
        self.total = {name: [0, 0] for name in _NAMES.values()}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(kind, DTensor) for kind in types):
            # DTensor then dispatches again, on its local tensors.
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        library, _, operation = func._schema.name.partition("::")
        if library in ("c10d", "_c10d_functional", "_dtensor"):
            start = operation.replace("_", "")
            found = [_NAMES[n] for n in _NAMES if start.startswith(n)]
            if found:
                self._add(found[0], library, result, args)
            elif start not in _IGNORED:
                raise NotImplementedError(
                    f"The collective {library}::{operation} is not one that "
                    f"keras_tp counts. It counts: {sorted(_NAMES)}"
                )
        return result

    def _add(self, name, library, result, args):
        # c10d writes into its first argument and returns a work handle.
        written = args[0] if library == "c10d" else result
        tensors = pytree.tree_leaves(written)
        self.total[name][0] += len(tensors)
        self.total[name][1] += sum(t.numel() * t.itemsize for t in tensors)


def count_step(model, x, y=None):
    """Runs one step of a model, counts its collectives, and undoes it."""
    batch = batches.distribute_batch(undone_step.prepare(model, x, y))
    counter = CollectiveCounter()
    with undone_step.unchanged(model, _local, processes):
        undone_step.run(model, batch, counter)
    return {name: tuple(pair) for name, pair in counter.total.items()}


def _local(tensor):
    if isinstance(tensor, DTensor):
        return tensor._local_tensor
    return tensor.detach()
