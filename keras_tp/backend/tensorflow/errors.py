"""Adds the operation and the Keras layer to DTensor's errors."""

import contextlib
import re

import tensorflow as tf

# Messages of DTensor's passes for an operation that they cannot expand.
_UNSUPPORTED = re.compile(
    r"does not implement layout propagation"
    r"|must have fully replicated layout"
    r"|Only replicated or batch parallel"
    r"|over sharded dimension"
    r"|not implemented|not supported|Unsupported"
    r"|EmitAllScatter|to be divisible by sharding|SPMD expansion"
    r"|layout propagation|missing layout|op requires"
    r"|Rank for input|non-single-device|got a regular tensor",
    re.IGNORECASE,
)
_OPERATION = re.compile(
    r"\"tf\.(\w+)\"\(|'tf\.(\w+)' op|\[Op:(\w+)\]|op/function (\w+) got"
)
_SHOWN = 3


@contextlib.contextmanager
def explained(function=None):
    """Names the operation and its layers in a DTensor error of the block.

    Args:
        function: `tf.function` that runs in the block. Its graph shows which
            layers contain the operation. Defaults to `None`.

    Raises:
        NotImplementedError: in place of an error about a missing expansion.
    """
    try:
        yield
    except tf.errors.OpError as e:
        message = str(e.message)
        found = _OPERATION.search(message)
        if found is None or not _UNSUPPORTED.search(message):
            raise
        operation = next(name for name in found.groups() if name)
        where = _layers(function, operation)
        raise NotImplementedError(
            f"DTensor cannot run TensorFlow's operation {operation!r}"
            f"{where} with the layouts that meet there, and keras_tp has no "
            "rule for it. Leave the variables of that layer replicated (no "
            "pattern of the LayoutMap), ask for its input whole with a layout "
            "for the output of the layer before it, use another layer, or run "
            "the model with the JAX backend (KERAS_BACKEND=jax). Received: "
            f"{_first_line(message)}"
        ) from e


def _first_line(message):
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    return lines[0][:300] if lines else message


def _layers(function, operation):
    """Returns text that names the layers of an operation, or `""`."""
    names = []
    for concrete in _traces(function):
        for graph in (concrete.graph, *_inner_graphs(concrete.graph)):
            for node in graph.get_operations():
                if node.type != operation:
                    continue
                # Keras's layers are name scopes; the last part names the node.
                scope = node.name.rpartition("/")[0]
                if scope and scope not in names:
                    names.append(scope)
    if not names:
        return ""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f" (in layer {', '.join(map(repr, names[:_SHOWN]))}{more})"


def _traces(function):
    traces = getattr(function, "_list_all_concrete_functions", None)
    return traces() if traces is not None else []


def _inner_graphs(graph):
    for function in graph._functions.values():
        inner = getattr(function, "graph", None)
        if inner is not None:
            yield inner
