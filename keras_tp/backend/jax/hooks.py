"""The hook table of the JAX backend."""

import functools

import jax.numpy as jnp
import numpy as np
from keras.src.backend.jax import core
from keras.src.distribution.distribution_lib import distribution

from keras_tp.backend.hooks import Hook
from keras_tp.backend.jax import arrays
from keras_tp.backend.jax import batches
from keras_tp.backend.jax import pooling
from keras_tp.backend.jax import processes
from keras_tp.backend.jax import programs
from keras_tp.backend.processes import callbacks
from keras_tp.backend.processes import data_shards
from keras_tp.backend.saving import one_writer


def _hook_distribute_data_input(original):
    @functools.wraps(original)
    def distribute_data_input(per_process_batch, layout, batch_dim_name):
        if per_process_batch is None:
            return None
        if batches.is_sparse(per_process_batch):
            return batches.replicate_sparse(per_process_batch, layout)
        return original(
            per_process_batch,
            batches.fitting_sharding(per_process_batch.shape, layout),
            batch_dim_name,
        )

    return distribute_data_input


def _hook_repeat(original):
    """Repeats replicated KV heads for the query heads by a lookup.

    `jnp.repeat` broadcasts to a new dim and merges it with the old one. If only
    the query heads divide by the devices, XLA splits both of these dims, and
    gathers them in the backward pass. With a lookup, each device takes its own
    heads, and the gradient is summed over the devices once.
    """

    @functools.wraps(original)
    def repeat(x, repeats, axis=None):
        if isinstance(repeats, int) and axis is not None:
            size = x.shape[axis]
            if _only_repeated_divides(size, repeats):
                index = np.repeat(np.arange(size), repeats)
                x = core.convert_to_tensor(x)
                return jnp.take(x, index, axis=axis, mode="clip")
        return original(x, repeats, axis=axis)

    return repeat


def _only_repeated_divides(size, repeats):
    mesh = getattr(distribution(), "device_mesh", None)
    return mesh is not None and any(
        size % count and size * repeats % count == 0 for count in mesh.shape
    )


def _hook_print_msg(original):
    @functools.wraps(original)
    def print_msg(*args, **kwargs):
        if processes.is_first():
            return original(*args, **kwargs)

    return print_msg


def _of_several(hook):
    """Returns a row that replaces nothing in a run of one process."""

    def replace(original):
        if processes.world_size() == 1:
            return original
        return hook.replace(original)

    return hook._replace(replace=replace)


_TRAINER = "keras.src.backend.jax.trainer"

OF_SEVERAL_PROCESSES = [
    Hook(
        "jax._src.array:ArrayImpl",
        "_value",
        arrays.hook_value,
        "numpy sees the whole tensor, or an error that names who is missing",
    ),
    Hook(
        _TRAINER,
        "_distribute_data",
        batches.hook_distribute_data,
        "every process is given the same global batch, or its part",
    ),
    Hook(
        f"{_TRAINER}:JAXTrainer",
        "predict_on_batch",
        batches.hook_predict_on_batch,
        "every process is given the same global batch, or its part",
    ),
    Hook(
        f"{_TRAINER}:JAXEpochIterator",
        "__init__",
        batches.hook_epoch_iterator,
        "any kind of data is split, and epochs end together",
    ),
    Hook(
        f"{_TRAINER}:JAXEpochIterator",
        "_get_distributed_iterator",
        batches.hook_distributed_iterator,
        "processes with different data stop with an error",
    ),
    Hook(
        "keras.src.trainers.trainer:Trainer",
        "_symbolic_build",
        batches.hook_symbolic_build,
        "processes with different models stop with an error",
    ),
    Hook(
        "keras.src.utils.io_utils",
        "print_msg",
        _hook_print_msg,
        "one process prints progress",
    ),
    *callbacks.table(processes),
    *data_shards.table(processes),
]

TABLE = [
    Hook(
        "keras.src.backend.jax.numpy",
        "repeat",
        _hook_repeat,
        "heads that are fewer than the devices are not gathered",
    ),
    *(
        Hook(
            "keras.src.backend.jax.nn",
            name,
            pooling.hook_max_pool,
            "gradients are right where windows cross the border of two devices",
        )
        for name in ("max_pool", "adaptive_max_pool")
    ),
    Hook(
        "keras.src.backend.jax.distribution_lib",
        "distribute_data_input",
        _hook_distribute_data_input,
        "a last batch that the batch axis does not divide is replicated",
    ),
    Hook(
        "keras.src.backend.jax.distribution_lib",
        "distribute_tensor",
        arrays.hook_distribute_tensor,
        "a value that is in each process, or on one device, joins the mesh",
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
    Hook(
        f"{_TRAINER}:JAXTrainer",
        "_make_function",
        programs.hook_make_function,
        "programs with collectives on CPUs run one after the other",
    ),
    *callbacks.progress_table(),
    *callbacks.files_table(processes),
    *one_writer.table(processes, arrays.is_distributed),
    *map(_of_several, OF_SEVERAL_PROCESSES),
]
