"""The hook table: replaced attributes of Keras, torch and DTensor."""

import functools

import numpy as np
import torch
from keras.src import initializers
from keras.src import tree
from keras.src.backend.torch import core
from keras.src.distribution.distribution_lib import distribution
from torch.distributed.tensor import DTensor

from keras_tp.backend.hooks import Hook
from keras_tp.backend.processes import callbacks
from keras_tp.backend.processes import data_shards
from keras_tp.backend.saving import one_writer
from keras_tp.backend.torch import batches
from keras_tp.backend.torch import compiling
from keras_tp.backend.torch import initial_values
from keras_tp.backend.torch import optimizers
from keras_tp.backend.torch import parameters
from keras_tp.backend.torch import placement
from keras_tp.backend.torch import processes
from keras_tp.backend.torch import reading
from keras_tp.backend.torch import variables
from keras_tp.backend.torch.ops import conv_attention
from keras_tp.backend.torch.ops import index_update
from keras_tp.backend.torch.ops import kv_cache
from keras_tp.backend.torch.ops import matmul
from keras_tp.backend.torch.ops import repeat_heads
from keras_tp.backend.torch.ops import reshape
from keras_tp.backend.torch.ops import table


def _constant_of(initializer):
    """Returns the constant of an initializer; `None` for other initializers."""
    kind = type(initializer)
    if kind is initializers.Zeros:
        return 0
    if kind is initializers.Ones:
        return 1
    if kind is initializers.Constant and np.ndim(initializer.value) == 0:
        return initializer.value
    return None


def _give_layout(variable):
    """Sets and returns a variable's layout; `None` without a distribution."""
    current = distribution()
    if current is None:
        return None
    variable._layout = current.get_variable_layout(variable)
    return placement.as_placement(variable._layout)


def _hook_initialize(original):
    @functools.wraps(original)
    def _initialize(self, value):
        if distribution() is None:
            return original(self, value)
        if isinstance(value, torch.nn.Parameter):
            raise NotImplementedError(
                "A parameter of a torch module cannot be distributed: "
                f"variable {self.path!r} would have to share it. Build the "
                "model before you set a distribution and call "
                "`keras_tp.distribution.distribute_model`, or write the "
                f"module as Keras layers. Received: {type(value)} of shape "
                f"{tuple(value.shape)}"
            )
        value = core.convert_to_tensor(value, dtype=self._dtype)
        self._shape = self._validate_shape(value.shape)
        _give_layout(self)
        variables.lay_out(self, value)

    return _initialize


def _hook_initialize_with_initializer(original):
    """Makes only the shards of constants such as slots; slices other values."""

    @functools.wraps(original)
    def _initialize_with_initializer(self, initializer):
        placed = _give_layout(self)
        fill = None if placed is None else _constant_of(initializer)
        if fill is None or variables.stays_plain(self, placed):
            return original(self, initializer)
        dtype = core.to_torch_dtype(self._dtype)
        variables.set_value(
            self, placement.filled(self._shape, fill, dtype, placed)
        )

    return _initialize_with_initializer


def _hook_direct_assign(original):
    @functools.wraps(original)
    def _direct_assign(self, value):
        if not isinstance(self._value, DTensor):
            value = placement.to_full(value)
        return original(self, value)

    return _direct_assign


def _hook_operation_call(original):
    @functools.wraps(original)
    def __call__(self, *args, **kwargs):
        outputs = original(self, *args, **kwargs)
        if isinstance(outputs, DTensor):
            return placement.settle(outputs)
        if isinstance(outputs, (list, tuple, dict)):
            if any(isinstance(o, DTensor) for o in tree.flatten(outputs)):
                return tree.map_structure(
                    lambda o: (
                        placement.settle(o) if isinstance(o, DTensor) else o
                    ),
                    outputs,
                )
        return outputs

    return __call__


def _hook_make_function(attribute):
    """Splits the batches of a step function and gathers its outputs."""

    def replace(original):
        @functools.wraps(original)
        def make_function(self, force=False):
            made = getattr(self, attribute)
            result = original(self, force)
            step = getattr(self, attribute)
            if distribution() is None or step is made:
                return result
            processes.same_model(self)
            if self.jit_compile:
                compiling.check_compiler()

            @functools.wraps(step)
            def distributed_step(data):
                data = batches.distribute_batch(data)
                if self.jit_compile:
                    with compiling.fixed_shapes():
                        outputs = step(data)
                else:
                    outputs = step(data)
                return tree.map_structure(placement.to_full, outputs)

            setattr(self, attribute, distributed_step)
            return result

        return make_function

    return replace


def _hook_symbolic_build(original):
    @functools.wraps(original)
    def _symbolic_build(self, iterator=None, data_batch=None):
        if iterator is not None:
            # Before the random states are compared: models advance them.
            processes.same_model(self)
        return original(self, iterator=iterator, data_batch=data_batch)

    return _symbolic_build


def _hook_epoch_iterator(original):
    """Makes all processes agree on the number of batches."""

    @functools.wraps(original)
    def __init__(self, *args, **kwargs):
        current = distribution()
        original(self, *args, **kwargs)
        if current is None or processes.world_size() == 1:
            return
        self.data_adapter = batches.AgreedLength(self.data_adapter, current)
        self._num_batches = self.data_adapter.num_batches

    return __init__


def _hook_get_iterator(original):
    """Compares each epoch's first batch between the processes."""

    @functools.wraps(original)
    def _get_iterator(self):
        iterator = original(self)
        if distribution() is None or processes.world_size() == 1:
            return iterator
        return batches.Batches(iterator, distribution())

    return _get_iterator


def _is_distributed(model):
    return any(
        isinstance(variable._value, DTensor) for variable in model.variables
    )


_VARIABLE = "keras.src.backend.torch.core:Variable"
_TRAINER = "keras.src.backend.torch.trainer:TorchTrainer"
_EPOCH = "keras.src.backend.torch.trainer:TorchEpochIterator"
_DTENSOR = "torch.distributed.tensor:DTensor"

TABLE = [
    Hook(
        _VARIABLE,
        "_initialize",
        _hook_initialize,
        "a variable is born as its shard",
    ),
    Hook(
        _VARIABLE,
        "_initialize_with_initializer",
        _hook_initialize_with_initializer,
        "slots are made as shards, never whole",
    ),
    Hook(
        _VARIABLE,
        "_direct_assign",
        _hook_direct_assign,
        "a distributed value can be assigned to a plain variable",
    ),
    Hook(
        "keras.src.backend.torch.layer:TorchLayer",
        "named_parameters",
        parameters.hook_named_parameters,
        "zero_grad reaches the variables of a model that was moved",
    ),
    Hook(
        "keras.src.backend.torch.layer:TorchLayer",
        "_track_variables",
        parameters.hook_track_variables,
        "a layer that is built does not have a part of a model planned",
    ),
    Hook(
        _DTENSOR,
        "__array__",
        reading.hook_array,
        "numpy sees the whole tensor, or an error that names who is missing",
    ),
    Hook(
        _DTENSOR,
        "numpy",
        reading.hook_numpy,
        "numpy sees the whole tensor, or an error that names who is missing",
    ),
    Hook(
        _DTENSOR,
        "__setitem__",
        index_update.hook_setitem,
        "what is written into a split tensor is not lost",
    ),
    *(
        Hook(_DTENSOR, name, hook, "Python reads no part for the whole")
        for name, hook in (
            ("tolist", reading.hook_tolist),
            ("__format__", reading.hook_format),
            ("__repr__", reading.hook_repr),
        )
    ),
    Hook(
        "keras.src.ops.operation:Operation",
        "__call__",
        _hook_operation_call,
        "partial sums are added up once, at the borders of layers",
    ),
    *(
        Hook(
            "torch",
            name,
            replacement,
            "a split sum is added up once, before a bias or a gate",
        )
        for name, replacement in (
            ("einsum", matmul.einsum),
            ("matmul", matmul.matmul),
            ("tensordot", matmul.settled),
        )
    ),
    Hook(
        "keras.src.backend.torch.core",
        "slice_update",
        kv_cache.slice_update,
        "a cache of keys and values stays split by heads",
    ),
    Hook(
        "keras.src.backend.torch.numpy",
        "repeat",
        repeat_heads.repeat,
        "heads that are fewer than the devices can be repeated",
    ),
    *(
        Hook(
            _TRAINER,
            f"make_{name}_function",
            _hook_make_function(f"{name}_function"),
            f"the batches of a {name} step are split",
        )
        for name in ("train", "test", "predict")
    ),
    Hook(
        "keras.src.trainers.trainer:Trainer",
        "_symbolic_build",
        _hook_symbolic_build,
        "processes with different models stop with an error",
    ),
    Hook(
        _EPOCH,
        "__init__",
        _hook_epoch_iterator,
        "any kind of data is split, and epochs end together",
    ),
    Hook(
        _EPOCH,
        "_get_iterator",
        _hook_get_iterator,
        "processes with different data stop with an error",
    ),
    *callbacks.table(),
    *data_shards.table(processes),
    *one_writer.table(_is_distributed),
    *(
        Hook(
            "keras.src.backend.torch.random",
            name,
            getattr(initial_values, name),
            "a variable's values are drawn without more copies of it",
        )
        for name in ("uniform", "truncated_normal")
    ),
    *(
        Hook(
            "keras.src.backend.torch.core",
            name,
            table.whole,
            "split values can be written into a plain tensor, as metrics do",
        )
        for name in ("scatter", "scatter_update")
    ),
    *(
        Hook(
            owner,
            "reshape",
            reshape.hook_reshape,
            "a dim that cannot stay split in its new shape is gathered",
        )
        for owner in ("keras.src.backend.torch.numpy", _DTENSOR)
    ),
    *(
        Hook(
            owner,
            name,
            table.whole,
            "torch composes it of views, or sorts, that DTensor cannot split",
        )
        for owner, name in (
            ("torch", "stft"),
            ("torch", "istft"),
            ("keras.src.backend.torch.core", "associative_scan"),
            ("keras.src.backend.torch.linalg", "jvp"),
            ("keras.src.backend.torch.numpy", "median"),
            ("keras.src.backend.torch.numpy", "nanmedian"),
            ("keras.src.backend.torch.numpy", "nanquantile"),
            ("keras.src.backend.torch.numpy", "quantile"),
        )
    ),
    Hook(
        "torch.distributed.tensor._ops._math_ops",
        "_infer_reduction_dims",
        table.all_dims,
        "DTensor takes an empty list of dims for none, torch for all of them",
    ),
    Hook(
        "torch",
        "vmap",
        table.whole_vmap,
        "what is mapped is computed whole, as metrics do",
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
        conv_attention.embedding,
        "the gradient of a split table is split",
    ),
    Hook(
        "keras.src.backend.torch.numpy",
        "take",
        conv_attention.take,
        "the scales of a split table are not gathered",
    ),
    *compiling.TABLE,
    Hook(
        f"{_DTENSOR}._op_dispatcher",
        "_custom_op_handlers",
        table.with_handlers,
        "operations are split, or drawn, as one process does",
    ),
    Hook(
        f"{_DTENSOR}._op_dispatcher",
        # A setting of each thread.
        "_allow_implicit_replication",
        lambda original: True,
        "plain tensors, equal in all processes, meet distributed ones",
    ),
]
