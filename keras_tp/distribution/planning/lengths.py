"""Finds dims whose size is a number of times a length or batch, plus a rest.

A text behind image tokens is longer than the text, a convolution with strides
makes it shorter, and a slice cuts tokens off. A model may add an example of its
own to each batch.
"""

import math

import numpy as np

_STRIDED = ("Conv", "MaxPool", "AveragePool")
_JOINED = ("Append", "Concatenate", "Hstack", "Vstack")


def find(graph, unit):
    """Returns a dict of `(index of a value, dim)` to `(times, rest)`.

    Dims that are a multiple of the unit are not in it.

    Args:
        graph: `Graph` with all its steps.
        unit: Int, placeholder size of the length or of the batch.
    """
    found = {}
    for step in graph.steps:
        for output in step.outputs:
            for j, size in enumerate(output.shape):
                growth = _growth(unit, found, step, output, j, size)
                if growth is not None:
                    found[output.index, j] = growth
    return found


def _growth(unit, found, step, output, j, size):
    if size % unit == 0:
        return None
    if step.kind in _JOINED:
        growth = _of_joined(unit, found, step, output, j, size)
    elif step.kind in _STRIDED:
        growth = _of_strided(unit, found, step, j, size)
    elif step.kind == "Pad":
        growth = _of_padded(unit, found, step.inputs[0], j, size)
    elif step.kind == "GetItem":
        growth = _of_slice(unit, found, step, j, size)
    else:
        growth = None
    return growth or _of_same_size(found, step, output, j, size)


def _of_dim(unit, found, value, i):
    """Returns the `(times, rest)` of a dim."""
    size = value.shape[i]
    if (value.index, i) in found:
        return found[value.index, i]
    return (size // unit, 0) if size % unit == 0 else (0, size)


def _of_joined(unit, found, step, output, j, size):
    inputs = [x for x in step.inputs if x.ndim == output.ndim]
    if sum(x.shape[j] for x in inputs) != size:
        return None
    parts = [_of_dim(unit, found, x, j) for x in inputs]
    times = sum(part[0] for part in parts)
    return (times, sum(part[1] for part in parts)) if times else None


def _of_strided(unit, found, step, j, size):
    """The size is exact for lengths that the stride divides."""
    x = step.inputs[0]
    stride = getattr(step.operation, "strides", None)
    if isinstance(stride, (tuple, list)) and len(stride) == 1:
        (stride,) = stride
    times, rest = _of_dim(unit, found, x, j)
    if not times or not j or x.ndim != 3 or not isinstance(stride, int):
        return None
    if step.operation.padding == "valid":
        if step.kind == "Conv":
            window = step.inputs[1].shape[0]
        else:
            (window,) = np.broadcast_to(step.operation.pool_size, (1,))
        rest += stride - int(window)
    return times / stride, math.floor(rest / stride)


def _of_padded(unit, found, x, j, size):
    times, rest = _of_dim(unit, found, x, j)
    return (times, rest + size - x.shape[j]) if times else None


def _of_slice(unit, found, step, j, size):
    key = step.args[1] if len(step.args) > 1 else step.kwargs.get("key")
    key = key if isinstance(key, (tuple, list)) else (key,)
    x = step.inputs[0]
    # Indices and new dims move the dims behind them.
    if len(key) <= j or not all(isinstance(k, slice) for k in key[: j + 1]):
        return None
    stop = key[j].stop
    if key[j].step not in (None, 1) or not (stop is None or stop < 0):
        return None
    times, rest = _of_dim(unit, found, x, j)
    return (times, rest - (x.shape[j] - size)) if times else None


def _of_same_size(found, step, output, j, size):
    """Returns the growth of an input's dim that has this size, or `None`.

    The dim at the same place comes first, counted from the left or from the
    right. At another place, all input dims of this size have to grow.
    """
    others = []
    for x in step.inputs:
        for i in range(x.ndim):
            if x.shape[i] == size and (x.index, i) in found:
                if i == j or i - x.ndim == j - output.ndim:
                    return found[x.index, i]
                others.append(found[x.index, i])
    is_clear = not any(
        s == size and (x.index, i) not in found
        for x in step.inputs
        for i, s in enumerate(x.shape)
    )
    return others[0] if others and is_clear else None
