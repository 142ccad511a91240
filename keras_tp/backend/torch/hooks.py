"""The hook table: replaced attributes of Keras, torch and DTensor."""

import functools

import torch
from keras.src import tree
from keras.src.distribution.distribution_lib import distribution
from torch.distributed.tensor import DTensor

from keras_tp.backend import rematerialization as remat
from keras_tp.backend.hooks import Hook
from keras_tp.backend.hooks import methods_row
from keras_tp.backend.processes import callbacks
from keras_tp.backend.processes import data_shards
from keras_tp.backend.saving import one_writer
from keras_tp.backend.torch import batches
from keras_tp.backend.torch import compiling
from keras_tp.backend.torch import initial_values
from keras_tp.backend.torch import optimizers
from keras_tp.backend.torch import overlap
from keras_tp.backend.torch import placement
from keras_tp.backend.torch import processes
from keras_tp.backend.torch import reading
from keras_tp.backend.torch import rematerialization
from keras_tp.backend.torch import sequence_parallel
from keras_tp.backend.torch import variables
from keras_tp.backend.torch.ops import division
from keras_tp.backend.torch.ops import embedding
from keras_tp.backend.torch.ops import matmul
from keras_tp.backend.torch.ops import reshape
from keras_tp.backend.torch.ops import table
from keras_tp.backend.torch.ops import writes
from keras_tp.backend.torch_shared import export
from keras_tp.backend.torch_shared import layer_parameters


def _hook_operation_call(original):
    @functools.wraps(original)
    def __call__(self, *args, **kwargs):
        outputs = original(self, *args, **kwargs)
        if isinstance(outputs, DTensor):
            return overlap.settle(outputs)
        if isinstance(outputs, (list, tuple, dict)):
            if any(isinstance(o, DTensor) for o in tree.flatten(outputs)):
                return tree.map_structure(_settle, outputs)
        return outputs

    return __call__


def _settle(value):
    return overlap.settle(value) if isinstance(value, DTensor) else value


def _hook_make_function(original):
    """Splits the batches of a step function and gathers its outputs."""
    attribute = original.__name__.removeprefix("make_")

    @functools.wraps(original)
    def make_function(self, force=False):
        made = getattr(self, attribute)
        if distribution() is not None:
            compiling.without_jit_compile(self)
        result = original(self, force)
        step = getattr(self, attribute)
        if distribution() is not None and step is not made:
            processes.same_model(self)
            if self.jit_compile:
                step = compiling.checked(step)
            setattr(self, attribute, _distributed(step))
        return result

    return make_function


def _distributed(step):
    @functools.wraps(step)
    def distributed_step(data):
        outputs = step(batches.distribute_batch(data))
        sequence_parallel.forget()
        return tree.map_structure(placement.to_full, outputs)

    return distributed_step


def _hook_symbolic_build(original):
    @functools.wraps(original)
    def _symbolic_build(self, iterator=None, data_batch=None):
        if iterator is not None:
            # Before the random states are compared: models advance them.
            processes.same_model(self)
        return original(self, iterator=iterator, data_batch=data_batch)

    return _symbolic_build


def _is_distributed(model):
    return any(
        isinstance(variable._value, DTensor) for variable in model.variables
    )


_CORE = "keras.src.backend.torch.core"
_NUMPY = "keras.src.backend.torch.numpy"
_TRAINER = "keras.src.backend.torch.trainer"
_LAYER = "keras.src.backend.torch.layer:TorchLayer"
_DTENSOR = "torch.distributed.tensor:DTensor"

TABLE = [
    Hook(
        f"{_CORE}:Variable",
        "_initialize",
        variables.hook_initialize,
        "each process makes only its shard of a variable",
    ),
    Hook(
        f"{_CORE}:Variable",
        "_initialize_with_initializer",
        variables.hook_initialize_with_initializer,
        "each process makes only its shards of optimizer slots",
    ),
    remat.row("torch", rematerialization.keeping),
    Hook(
        _LAYER,
        "named_parameters",
        layer_parameters.hook_named_parameters,
        "zero_grad finds the variables of a model that was moved",
    ),
    Hook(
        _LAYER,
        "_track_variables",
        layer_parameters.hook_track_variables,
        "building a layer does not plan a part of a model",
    ),
    methods_row(
        _DTENSOR,
        reading.Reads,
        "Python reads whole tensors, or stops with an error",
    ),
    Hook(
        _DTENSOR,
        "__setitem__",
        writes.hook_setitem,
        "writes into a split tensor are not lost",
    ),
    Hook(
        "keras.src.ops.operation:Operation",
        "__call__",
        _hook_operation_call,
        "partial sums have one all-reduce, at the end of a layer",
    ),
    *(
        Hook(
            "torch",
            name,
            hook,
            "partial sums have one all-reduce, before a bias",
        )
        for name, hook in (
            ("einsum", matmul.einsum),
            ("matmul", matmul.matmul),
            ("tensordot", matmul.settled),
        )
    ),
    *(
        Hook(
            owner,
            name,
            division.hook_divide,
            "the partial gradient of a quotient has one all-reduce",
        )
        for owner, name in (("torch", "divide"), (_DTENSOR, "__truediv__"))
    ),
    Hook(
        _CORE,
        "slice_update",
        writes.hook_slice_update,
        "a KV cache stays split by heads",
    ),
    Hook(
        _NUMPY,
        "split",
        reshape.hook_split,
        "queries, keys and values of one product stay split",
    ),
    Hook(
        _NUMPY,
        "repeat",
        reshape.hook_repeat,
        "KV heads can be repeated if they are fewer than the devices",
    ),
    Hook(
        f"{_TRAINER}:TorchTrainer",
        ("make_train_function", "make_test_function", "make_predict_function"),
        _hook_make_function,
        "the batches of a step are split",
    ),
    Hook(
        "keras.src.trainers.trainer:Trainer",
        "_symbolic_build",
        _hook_symbolic_build,
        "processes with different models stop with an error",
    ),
    Hook(
        f"{_TRAINER}:TorchEpochIterator",
        "__init__",
        batches.hook_epoch_iterator,
        "data of any kind is split, and must be equal in all processes",
    ),
    *callbacks.table(),
    *data_shards.table(processes),
    *one_writer.table(
        _is_distributed, functools.partial(export.exporting, variables.whole)
    ),
    *(
        Hook(
            "keras.src.backend.torch.random",
            name,
            getattr(initial_values, name),
            "initial values are drawn without extra copies",
        )
        for name in ("uniform", "truncated_normal")
    ),
    *(
        Hook(
            owner,
            "reshape",
            reshape.hook_reshape,
            "a dim that cannot stay split in its new shape is gathered",
        )
        for owner in (_NUMPY, _DTENSOR)
    ),
    *(
        Hook(owner, names, table.whole, "it runs on whole tensors")
        for owner, names in (
            ("torch", ("stft", "istft")),
            (_CORE, ("associative_scan", "scatter")),
            ("keras.src.backend.torch.linalg", "jvp"),
            (_NUMPY, ("median", "nanmedian", "nanquantile", "quantile")),
        )
    ),
    Hook(
        "torch",
        "vmap",
        table.whole_vmap,
        "vmap, as in metrics, runs on whole tensors",
    ),
    Hook(
        "torch.distributed.tensor._ops._math_ops",
        "_infer_reduction_dims",
        table.all_dims,
        "an empty list of dims reduces all dims, as in torch",
    ),
    Hook(
        "keras.src.backend.torch.optimizers.torch_parallel_optimizer:"
        "TorchParallelOptimizer",
        "_backend_update_step",
        optimizers.update_shards,
        "each process updates its shards, without DTensor's dispatch",
    ),
    Hook(
        "torch.nn.functional",
        "embedding",
        embedding.embedding,
        "the gradient of a split table is split",
    ),
    Hook(
        _NUMPY,
        "take",
        embedding.take,
        "the scales of a split table are not gathered",
    ),
    Hook(
        "keras.src.backend.torch.nn",
        "_can_use_flash_attention",
        compiling.hook_can_use_flash_attention,
        "attention does not break the graph of a compiled step",
    ),
    Hook(
        _DTENSOR,
        "backward",
        torch.compiler.disable,
        "what a compiled backward pass calls is not compiled again",
    ),
    Hook(
        "torch._functorch._aot_autograd.runtime_wrappers:AOTDispatchAutograd",
        "process_runtime_tangent",
        compiling.hook_tangent,
        "a compiled step may have outputs that its loss does not use",
    ),
    Hook(
        f"{_DTENSOR}._op_dispatcher",
        "_custom_op_handlers",
        table.with_handlers,
        "operations give the numbers of one process",
    ),
    Hook(
        f"{_DTENSOR}._op_dispatcher",
        # A setting of each thread.
        "_allow_implicit_replication",
        lambda original: True,
        "operations accept plain tensors, equal in all processes, with "
        "DTensors",
    ),
]
