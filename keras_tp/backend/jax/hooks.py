"""The hook table of the JAX backend."""

import jax.numpy as jnp
import numpy as np
from keras.src.backend.jax import core

from keras_tp.backend import rematerialization as remat
from keras_tp.backend import repeated_heads
from keras_tp.backend.hooks import Hook
from keras_tp.backend.hooks import around
from keras_tp.backend.hooks import methods_row
from keras_tp.backend.jax import arrays
from keras_tp.backend.jax import batches
from keras_tp.backend.jax import blocks
from keras_tp.backend.jax import convolution
from keras_tp.backend.jax import gathers
from keras_tp.backend.jax import pooling
from keras_tp.backend.jax import processes
from keras_tp.backend.jax import programs
from keras_tp.backend.jax import rematerialization
from keras_tp.backend.jax import sequence_parallel
from keras_tp.backend.jax import storage
from keras_tp.backend.jax import vocab_parallel
from keras_tp.backend.processes import callbacks
from keras_tp.backend.processes import data_shards
from keras_tp.backend.saving import one_writer


def _repeat(original, x, repeats, axis=None):
    """Repeats replicated KV heads for the query heads by a lookup.

    `jnp.repeat` broadcasts to a new dim and merges it with the old one. If only
    the query heads divide by the devices, XLA splits both of these dims, and
    gathers them in the backward pass. With a lookup, each device takes its own
    heads, and the gradient is summed over the devices once.
    """

    if isinstance(repeats, int) and axis is not None:
        size = x.shape[axis]
        if repeated_heads.only_repeated_divide(size, repeats):
            index = np.repeat(np.arange(size), repeats)
            x = core.convert_to_tensor(x)
            return jnp.take(x, index, axis=axis, mode="clip")
    return original(x, repeats, axis=axis)


class _Trainer:
    """Methods of `JAXTrainer`."""

    _make_function = programs.make_function
    _get_jax_state = storage.as_stored
    _get_state_sharding_spec = storage.as_stored
    predict_on_batch = batches.predict_on_batch

    def _symbolic_build(original, self, iterator=None, data_batch=None):
        if iterator is not None:
            processes.same_model(self)
        return original(self, iterator=iterator, data_batch=data_batch)


class _EpochIterator:
    """Methods of `JAXEpochIterator`."""

    __init__ = batches.agree_on_length
    _get_distributed_iterator = batches.in_step


def _of_several(hook):
    """Returns a row that replaces nothing in a run of one process."""

    def replace(original):
        if processes.world_size() == 1:
            return original
        return hook.replace(original)

    return hook._replace(replace=replace)


_KERAS = "keras.src.backend.jax"

OF_SEVERAL_PROCESSES = [
    Hook(
        "jax._src.array:ArrayImpl",
        "_value",
        arrays.hook_value,
        "numpy reads the whole tensor, or an error names missing processes",
    ),
    methods_row(
        f"{_KERAS}.trainer:JAXEpochIterator",
        _EpochIterator,
        "data of any kind is split, and processes read it in step",
    ),
    *data_shards.table(processes),
]

TABLE = [
    Hook(
        f"{_KERAS}.numpy",
        "repeat",
        around(_repeat),
        "KV heads are not gathered if they are fewer than the devices",
    ),
    Hook(
        f"{_KERAS}.nn",
        ("max_pool", "adaptive_max_pool"),
        pooling.hook_max_pool,
        "gradients are correct where pooling windows cross two devices",
    ),
    Hook(
        "jax.lax",
        "conv_general_dilated",
        convolution.hook_conv,
        "gradients of kernels are correct on meshes of two axes",
    ),
    Hook(
        f"{_KERAS}.numpy",
        "correlate",
        around(convolution.correlate),
        "correlations are correct on meshes of two axes",
    ),
    Hook(
        f"{_KERAS}.math",
        "top_k",
        around(vocab_parallel.top_k),
        "the largest of split values are found without a gather of the values",
    ),
    Hook(
        f"{_KERAS}.distribution_lib",
        "distribute_tensor",
        around(arrays.distribute_tensor),
        "a value of each process, or of one device, is placed on the mesh",
    ),
    Hook(
        f"{_KERAS}.trainer",
        "_distribute_data",
        around(batches.distribute_data),
        "processes share a batch, or replicate it if it does not divide",
    ),
    methods_row(
        f"{_KERAS}.trainer:JAXTrainer",
        _Trainer,
        "processes run the same steps on the same batches, one after the other",
    ),
    Hook(
        "jax._src.interpreters.pxla:ExecuteReplicated",
        "__call__",
        programs.hook_call,
        "programs with collectives on CPUs run one after the other",
    ),
    Hook(
        "jax._src.pjit",
        "_get_fastpath_data",
        programs.hook_fast_path,
        "programs with collectives on CPUs run one after the other",
    ),
    methods_row(
        f"{_KERAS}.numpy",
        blocks.Functions,
        "the blocks of a product, such as queries and keys, stay split",
    ),
    remat.row("jax", rematerialization.keeping),
    methods_row(
        f"{_KERAS}.numpy",
        sequence_parallel.Functions,
        "activations are split along the sequence; sums have a name, by which "
        "rematerialization keeps them",
    ),
    Hook(
        "keras.src.backend.common.stateless_scope:StatelessScope",
        "__init__",
        storage.hook_scope,
        "the state of a step has the shapes that variables are stored in",
    ),
    methods_row(
        f"{_KERAS}.core:JaxVariable",
        storage.Variable,
        "dims of blocks, or that devices do not divide, are stored and split",
    ),
    Hook(
        f"{_KERAS}.optimizer:JaxOptimizer",
        "_backend_apply_gradients",
        storage.hook_apply_gradients,
        "gradients of stored arrays have the shape of what they update",
    ),
    *callbacks.table(),
    *one_writer.table(arrays.is_distributed, gathers.exporting),
    *map(_of_several, OF_SEVERAL_PROCESSES),
]
