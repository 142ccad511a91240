"""Adds the operation and the Keras layer to DTensor's errors."""

import contextlib
import re

import tensorflow as tf
from keras.src import tree

from keras_tp.backend.hooks import around
from keras_tp.backend.tensorflow import placement

# Messages of DTensor's passes for an operation that they cannot expand.
_UNSUPPORTED = re.compile(
    r"does not implement layout propagation"
    r"|must have fully replicated layout"
    r"|Only replicated or batch parallel"
    r"|over sharded dimension"
    r"|not implemented|not supported|Unsupported"
    r"|EmitAllScatter|to be divisible by sharding|SPMD expansion"
    r"|layout propagation|missing layout|op requires|shape is not static"
    r"|Rank for input|non-single-device|got a regular tensor"
    r"|ComputeLayoutForward error",
    re.IGNORECASE,
)
# `DTensorLayout` is one of its own, beside the operation.
_OPERATION = re.compile(
    r"\"tf\.(?!DTensorLayout)(\w+)\"\(|'tf\.(?!DTensorLayout)(\w+)' op"
    r"|\[Op:(\w+)\]|op/function (\w+) got"
)
# Messages of a function that draws from a dataset.
_DRAWS = re.compile(r"failed to merge mesh cluster|IteratorGetNext")
_SHOWN = 3


@contextlib.contextmanager
def explained(function=None):
    """Names the operation and its layers in a DTensor error of the block.

    The graph of `function`, a `tf.function` that runs in the block, shows which
    layers contain the operation. Raises `NotImplementedError` in place of an
    error about a missing expansion.
    """
    try:
        yield
    except tf.errors.OpError as e:
        message = str(e.message)
        if _DRAWS.search(message):
            raise NotImplementedError(
                "A function that runs on the devices of a mesh cannot contain "
                "operations that have no place there, such as a loop over a "
                "`tf.data.Dataset` or `next(iterator)`. Draw the batches "
                "outside of it: `for batch in dataset: step(batch)`. Received: "
                f"{_first_line(message)}"
            ) from e
        found = _OPERATION.search(message)
        if found is None or not _UNSUPPORTED.search(message):
            raise
        operation = next(name for name in found.groups() if name)
        where = _layers(function, operation)
        raise NotImplementedError(
            f"DTensor cannot run TensorFlow's operation {operation!r}{where} "
            "with the layouts of its inputs, and keras_tp has no rule for it. "
            "Replicate the variables of that layer (no pattern of the "
            "LayoutMap), replicate its input (a layout of Nones for the output "
            "of the previous layer), use another layer, or run the model with "
            "the JAX backend (KERAS_BACKEND=jax). Received: "
            f"{_first_line(message)}"
        ) from e


@around
def hook_gradient(original, self, /, *args, **kwargs):
    """Explains the errors of gradients that a custom loop computes eagerly.

    Its layers are called in blocks of their own, which have ended by then.
    """
    is_placed = tf.executing_eagerly() and any(
        placement.is_dtensor(getattr(x, "_value", x))
        for x in tree.flatten((args, kwargs))
    )
    if not is_placed:
        return original(self, *args, **kwargs)
    with explained():
        return original(self, *args, **kwargs)


def _first_line(message):
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    return lines[0][:300] if lines else message


def _layers(function, operation):
    """Returns text that names the layers of an operation, or `""`."""
    names = []
    for node in _nodes(function):
        # Keras's layers are name scopes; the last part names the node.
        scope = node.name.rpartition("/")[0]
        if node.type == operation and scope and scope not in names:
            names.append(scope)
    if not names:
        return ""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f" (in layer {', '.join(map(repr, names[:_SHOWN]))}{more})"


def _nodes(function):
    """Yields the operations in the traces of a `tf.function`, if it is one."""
    if not hasattr(function, "_list_all_concrete_functions"):
        return
    for trace in function._list_all_concrete_functions():
        inner = trace.graph._functions.values()
        graphs = [getattr(f, "graph", None) for f in inner]
        for graph in filter(None, [trace.graph, *graphs]):
            yield from graph.get_operations()
