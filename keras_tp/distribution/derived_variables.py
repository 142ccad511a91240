"""Splits the variables that LoRA and quantization add like their kernel.

Keras adds them to an existing layer, by `enable_lora` and `quantize`, long
after the layouts of its model were decided. Each dim of such a variable follows
a dim of the kernel and takes its mesh axis. A dim for the rank of LoRA or for
groups of rows follows no dim and is never split.
"""

import collections
import contextlib
import threading
import warnings
import weakref

from keras.src.layers import EinsumDense
from keras.src.layers import Embedding

from keras_tp.distribution.tensor_layout import TensorLayout
from keras_tp.distribution.tensor_layout import axis_size

# A variable's name -> the attribute that holds it.
_KERNELS = {
    "kernel": "_kernel",
    "embeddings": "_embeddings",
    "reverse_embeddings": "reverse_embeddings",
}
_SOURCES = {
    "lora_kernel_a": "_kernel",
    "lora_kernel_b": "_kernel",
    "kernel_scale": "_kernel",
    "kernel_zero": "_kernel",
    "lora_embeddings_a": "_embeddings",
    "lora_embeddings_b": "_embeddings",
    "embeddings_scale": "_embeddings",
    "embeddings_zero": "_embeddings",
    "reverse_embeddings_scale": "reverse_embeddings",
    "reverse_embeddings_zero": "reverse_embeddings",
}
# Modes of `quantize` whose variables this module can lay out.
_MODES = (None, "int8", "int4")

_state = threading.local()


class _Source(collections.namedtuple("_Source", ["path", "shape", "layout"])):
    """The path, shape and layout of a kernel."""


class _Change(collections.namedtuple("_Change", ["layer", "mode", "kernels"])):
    """A call in progress that adds variables to a layer.

    Args:
        layer: A Keras layer.
        mode: String, quantization mode of the layer, or `None`.
        kernels: Dict of attribute to the `_Source` that it held before.
    """


# Layers about to be quantized -> their distribution and kernels.
_noted = weakref.WeakKeyDictionary()


def note_kernels(layer, distribution):
    """Records the kernels of a layer before it is quantized.

    Args:
        layer: A Keras layer.
        distribution: The `Distribution` it was made under, or `None`.
    """
    held = {name: getattr(layer, name, None) for name in _KERNELS.values()}
    kernels = {k: _source(v) for k, v in held.items() if v is not None}
    _noted[layer] = distribution, kernels


def noted_distribution(layer, otherwise):
    """Returns the recorded distribution of a layer, or `otherwise`."""
    return _noted.get(layer, (otherwise,))[0]


@contextlib.contextmanager
def changing(layer, mode):
    """Context in which variables that a layer adds follow its kernels.

    Args:
        layer: A Keras layer.
        mode: String, quantization mode of the layer, or `None`.
    """
    _, kernels = _noted.pop(layer, (None, {}))
    before = getattr(_state, "change", None)
    _state.change = _Change(layer, mode, kernels)
    try:
        yield
    finally:
        _state.change = before


def is_changing():
    """Returns whether a layer is adding variables, and so is incomplete."""
    return getattr(_state, "change", None) is not None


def _source(kernel):
    return _Source(kernel.path, tuple(kernel.shape), kernel._layout)


def layout_for(variable, named=None):
    """Returns the layout of a new variable that follows a kernel.

    Args:
        variable: A Keras variable that is being made.
        named: `TensorLayout` that the user gives to its path. It is ignored
            for a variable that replaces a kernel: the path is then the
            kernel's, and so is the layout. Defaults to `None`.

    Returns:
        A `TensorLayout`; `named` for a variable that follows no kernel.
    """
    change = getattr(_state, "change", None)
    shape = tuple(variable.shape)
    if change is None or not shape:
        return named
    replaced = change.kernels.get(_KERNELS.get(variable.name))
    if named is not None and replaced is None:
        return named
    if replaced is not None:
        source, dims = replaced, _dims_of_kernel(change, replaced.shape, shape)
    else:
        kernel, dims = _dims_of_follower(
            change.layer, change.mode, variable.name, shape
        )
        source = None if kernel is None else _source(kernel)
    if source is None or source.layout is None:
        return named
    axes, obstacles = _follow(source, dims, shape)
    if replaced is not None and not obstacles:
        obstacles = [
            f"dim {i} is inside of rows or columns of several dims"
            for i, axis in enumerate(source.layout.axes)
            if axis is not None and i not in dims
        ]
    why = "; ".join(obstacles)
    if obstacles:
        warnings.warn(
            f"Variable {variable.path!r} of shape {shape} cannot be split as "
            f"{source.path!r} of shape {source.shape} is, so each device holds "
            f"it whole: {why}.",
            stacklevel=2,
        )
    elif any(source.layout.axes):
        why = f"no dim of it is one that {source.path!r} is split along"
    else:
        why = f"{source.path!r} is whole"
    variable._origin = variable._origin._replace(follows=why)
    return TensorLayout(axes, source.layout.device_mesh)


def derived_of(layer):
    """Yields the variables that LoRA and quantization added to a layer.

    Args:
        layer: A Keras layer.

    Yields:
        `(variable, dims, kernel)`. `dims` has, for each dim of the variable,
        the dim of the kernel that it follows, or `None`.
    """
    mode = layer.quantization_mode
    for variable in (
        *layer._trainable_variables,
        *layer._non_trainable_variables,
    ):
        kernel, dims = _dims_of_follower(
            layer, mode, variable.name, tuple(variable.shape)
        )
        if kernel is not None and not isinstance(dims, str):
            yield variable, dims, kernel


def _follow(source, dims, shape):
    """Returns the axes of a variable, and why some source axes are dropped.

    Args:
        source: `_Source`.
        dims: List with, for each dim of the variable, the dim of the source
            that it follows, or `None`; or a string, why they are unknown.
        shape: Tuple of ints, the shape of the variable.
    """
    axes, obstacles = [None] * len(shape), []
    if not any(source.layout.axes):
        return axes, obstacles
    if isinstance(dims, str):
        return axes, [dims]
    for i, dim in enumerate(dims):
        axis = None if dim is None else source.layout.axes[dim]
        count = axis_size(source.layout.device_mesh, axis)
        if shape[i] % count == 0:
            axes[i] = axis
        else:
            obstacles.append(
                f"{shape[i]} along dim {i}, which holds the "
                f"{source.shape[dim]} of dim {dim} in pairs, do not divide by "
                f"{count}"
            )
    return axes, obstacles


def _dims_of_kernel(change, old, new):
    """Returns the dims of a kernel of shape `old` in its quantized form."""
    if change.mode not in _MODES:
        return f"the form that {change.mode!r} gives a kernel is not known"
    if len(old) == len(new) and not isinstance(change.layer, EinsumDense):
        # int4 packs one of them: two values in a byte.
        return list(range(len(old)))
    if old == new:
        return list(range(len(old)))
    # int4 reshapes any kernel to a matrix, and packs its columns.
    rows, columns = _rows_and_columns(change.layer, len(old))
    if rows != list(range(len(rows))):
        return "its dims are regrouped to rows and columns"
    return [_outermost(rows, old), _outermost(columns, old)]


def _dims_of_follower(layer, mode, name, shape):
    """Returns the kernel that a variable of this name follows, and its dims."""
    attribute = _SOURCES.get(name)
    if name == "g_idx":
        is_table = isinstance(layer, Embedding)
        attribute = "_embeddings" if is_table else "_kernel"
    kernel = getattr(layer, attribute, None) if attribute else None
    if kernel is None:
        return None, None
    if mode not in _MODES:
        return kernel, f"what {mode!r} adds is not known"
    ndim = len(kernel.shape)
    if name.endswith(("_a", "_b")):
        return kernel, _dims_of_lora(layer, mode, name, ndim)
    # A matrix has one scale, or one per group, for each index of dim `kept`.
    kept = 0 if attribute == "_embeddings" else 1
    if name == "g_idx":
        return kernel, [1 - kept]
    if mode == "int8" and isinstance(layer, EinsumDense):
        return kernel, _dims_of_scale(layer, ndim)
    if len(shape) == 1:
        return kernel, [kept]
    # Every device has all groups of the other dim, and looks up its own.
    return kernel, [i if i == kept else None for i in range(ndim)]


def _dims_of_lora(layer, mode, name, ndim):
    # One dim is the rank, which is never split.
    if mode == "int4" and isinstance(layer, EinsumDense):
        logical = tuple(layer.original_kernel_shape)
        rows, columns = _rows_and_columns(layer, len(logical))
        dims = [None] * len(logical)
        if rows == list(range(len(rows))):
            dims[_outermost(rows, logical)] = 0
            dims[_outermost(columns, logical)] = 1
    else:
        dims = list(range(ndim))
    return [*dims[:-1], None] if name.endswith("_a") else [None, dims[-1]]


def _dims_of_scale(layer, ndim):
    """Returns the kernel's dims as `_get_kernel_scale_shape` arranges them."""
    dims = [None if i in layer._kernel_reduced_axes else i for i in range(ndim)]
    dims = [dims[i] for i in layer._kernel_transpose_axes]
    for i in sorted(layer._kernel_expand_axes):
        dims.insert(i, None)
    for i in sorted(layer._kernel_squeeze_axes, reverse=True):
        dims.pop(i)
    return dims


def _rows_and_columns(layer, ndim):
    """Returns the dims of a kernel that are summed over, and the others."""
    rows = sorted(layer._kernel_reduced_axes)
    return rows, [i for i in range(ndim) if i not in rows]


def _outermost(dims, shape):
    """Returns the dim along which a group of merged dims can be split."""
    return next((i for i in dims if shape[i] > 1), dims[0])
