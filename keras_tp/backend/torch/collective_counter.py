"""Counts the collectives of one step in torch's dispatcher."""

import contextlib

import torch
from keras.src.backend.common import global_state
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from keras_tp.backend.torch import batches
from keras_tp.backend.torch import processes

# Operation of a torch library -> name that all backends use.
_OPERATIONS = {
    "_c10d_functional::all_reduce": "all_reduce",
    "_c10d_functional::all_reduce_": "all_reduce",
    "_c10d_functional::all_reduce_coalesced": "all_reduce",
    "_c10d_functional::all_reduce_coalesced_": "all_reduce",
    "_c10d_functional::all_gather_into_tensor": "all_gather",
    "_c10d_functional::all_gather_into_tensor_out": "all_gather",
    "_c10d_functional::all_gather_into_tensor_coalesced": "all_gather",
    "_c10d_functional::reduce_scatter_tensor": "reduce_scatter",
    "_c10d_functional::reduce_scatter_tensor_coalesced": "reduce_scatter",
    "_c10d_functional::all_to_all_single": "all_to_all",
    "_dtensor::shard_dim_alltoall": "all_to_all",
    "c10d::allreduce_": "all_reduce",
    "c10d::allreduce_coalesced_": "all_reduce",
    "c10d::allgather_": "all_gather",
    "c10d::_allgather_base_": "all_gather",
    "c10d::allgather_coalesced_": "all_gather",
    "c10d::allgather_into_tensor_coalesced_": "all_gather",
    "c10d::reduce_scatter_": "reduce_scatter",
    "c10d::_reduce_scatter_base_": "reduce_scatter",
    "c10d::reduce_scatter_tensor_coalesced_": "reduce_scatter",
    "c10d::alltoall_": "all_to_all",
    "c10d::alltoall_base_": "all_to_all",
    "c10d::send": "collective_permute",
}
_NAMES = (
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "collective_permute",
)
# Not part of a step's communication.
_IGNORED = (
    "wait_tensor",
    "_wrap_tensor_autograd",
    "recv_",
    "barrier",
    "monitored_barrier_",
)


class CollectiveCounter(TorchDispatchMode):
    """Counts the collectives that are dispatched within its context.

    Attributes:
        total: Dict of collective name to a list `[count, bytes]`: the number of
            tensors communicated, and the size of the results on this device.
    """

    def __init__(self):
        super().__init__()
        self.total = {name: [0, 0] for name in _NAMES}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(kind, DTensor) for kind in types):
            # DTensor then dispatches again, on its local tensors.
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        operation = func._schema.name
        library, _, name = operation.partition("::")
        if operation in _OPERATIONS:
            self._add(_OPERATIONS[operation], library, result, args)
        elif library in ("c10d", "_c10d_functional", "_dtensor"):
            if name not in _IGNORED:
                raise NotImplementedError(
                    f"The collective {operation} is not one that keras_tp "
                    f"counts. It counts: {sorted(_OPERATIONS)}"
                )
        return result

    def _add(self, name, library, result, args):
        # c10d writes into its first argument and returns a work handle.
        tensors = _tensors(args[0] if library == "c10d" else result)
        self.total[name][0] += len(tensors)
        self.total[name][1] += sum(t.numel() * t.itemsize for t in tensors)


def count_step(model, x, y=None):
    """Runs one step of a model, counts its collectives, and undoes it.

    Args:
        model: A Keras model whose distribution is the current one.
        x: Inputs of one batch.
        y: Targets of the batch. Defaults to `None`: a predict step.

    Returns:
        Dict of collective name to `(count, bytes)`.
    """
    data = (x,) if y is None else (x, y)
    if y is None:
        if not all(layer.built for layer in model._flatten_layers()):
            with torch.no_grad():
                model(x)
    else:
        model._symbolic_build(data_batch=data)
    batch = batches.distribute_batch(data)
    training = model.training
    with _unchanged(model), CollectiveCounter() as counter:
        if y is None:
            model.eval()
            with torch.no_grad():
                model.predict_step(batch)
        else:
            model.train()
            model.train_step(batch)
    model.train(training)
    return {name: tuple(pair) for name, pair in counter.total.items()}


@contextlib.contextmanager
def _unchanged(model):
    """Restores weights, slots, metrics, gradients and random state."""
    variables = list(model.variables) + list(model.metrics_variables)
    if getattr(model, "optimizer", None) is not None:
        variables += list(model.optimizer.variables)
    generator = global_state.get_global_attribute("global_seed_generator")
    if generator is not None:
        variables.append(generator.state)
    held = [
        (variable, _local(variable._value).clone(), variable._value.grad)
        for variable in {id(v): v for v in variables}.values()
    ]
    random_state = processes.rng_state()
    try:
        yield
    finally:
        processes.set_rng_state(random_state)
        with torch.no_grad():
            for variable, value, gradient in held:
                _local(variable._value).copy_(value)
                variable._value.grad = gradient


def _local(tensor):
    if isinstance(tensor, DTensor):
        return tensor._local_tensor
    return tensor.detach()


def _tensors(value):
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [t for item in value for t in _tensors(item)]
    return []
