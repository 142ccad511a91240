"""Splits the variables that LoRA and quantization add like their kernel.

Keras adds them to an existing layer, by `enable_lora` and `quantize`, long
after the layouts of its model were decided. Each dim of such a variable follows
a dim of the kernel and takes its mesh axis. A dim for the rank of LoRA or for
groups of rows follows no dim and is never split.
"""

import collections
import contextlib
import re
import threading
import warnings

from keras.src.distribution.distribution_lib import distribution as current
from keras.src.layers import EinsumDense
from keras.src.layers import Embedding

from keras_tp.distribution.tensor_layout import axis_size
from keras_tp.distribution.tensor_layout import layout_like

# A kernel's name -> the attribute that holds it.
_KERNELS = {
    "kernel": "_kernel",
    "embeddings": "_embeddings",
    "reverse_embeddings": "reverse_embeddings",
}
# The name of a variable that LoRA or quantization adds -> that of its kernel.
_ADDED = re.compile(r"lora_(.+)_[ab]|(.+)_(?:scale|zero)")
# Modes of `quantize` whose variables this module can lay out.
_MODES = (None, "int8", "int4")


class _Source(collections.namedtuple("_Source", ["path", "shape", "layout"])):
    """The path, shape and layout of a kernel."""


class _Kernels(
    collections.namedtuple("_Kernels", ["mode", "distribution", "sources"])
):
    """The kernels of a layer before it is quantized.

    `sources` is a dict of attribute to the `_Source` that it held.
    """


class _State(threading.local):
    # The layer that adds a variable in this thread.
    layer = None


_state = _State()


def note_kernels(layer, mode, distribution):
    """Records the kernels of a layer before it is quantized."""
    held = {name: getattr(layer, name, None) for name in _KERNELS.values()}
    sources = {k: _source(v) for k, v in held.items() if v is not None}
    vars(layer)["_kernels_before"] = _Kernels(mode, distribution, sources)


@contextlib.contextmanager
def changing(layer):
    """Context in which a variable that a layer adds follows its kernel.

    Yields:
        The `Distribution` for a layer that has no variables now: that of the
        kernels it had, or the current one.
    """
    before, _state.layer = _state.layer, layer
    try:
        yield _kernels_before(layer).distribution
    finally:
        _state.layer = before


def is_changing():
    """Returns whether a layer is adding variables, and so is incomplete."""
    return _state.layer is not None


def _kernels_before(layer):
    none = _Kernels(layer.quantization_mode, current(), {})
    return vars(layer).get("_kernels_before", none)


def _source(kernel):
    return _Source(kernel.path, tuple(kernel.shape), kernel._layout)


def layout_for(variable, named=None):
    """Returns the layout of a new variable: its kernel's, or `named`.

    `named` is the layout that the user gives to the path. A variable that
    replaces a kernel has its path, and its layout too.
    """
    layer, shape = _state.layer, tuple(variable.shape)
    if layer is None or not shape:
        return named
    before = _kernels_before(layer)
    replaced = before.sources.get(_KERNELS.get(variable.name))
    if replaced is not None:
        source = replaced
        dims = _dims_of_kernel(layer, before.mode, replaced.shape, shape)
    elif named is not None:
        return named
    else:
        kernel, dims = _dims_of_follower(
            layer, before.mode, variable.name, shape
        )
        source = None if kernel is None else _source(kernel)
    if source is None or source.layout is None:
        return named
    axes, obstacles = _follow(source, dims, shape)
    if replaced is not None and not obstacles:
        obstacles = [
            f"dim {i} is an inner dim of the rows or columns"
            for i, axis in enumerate(source.layout.axes)
            if axis is not None and i not in dims
        ]
    why = "; ".join(obstacles)
    if obstacles:
        warnings.warn(
            f"Variable {variable.path!r} of shape {shape} cannot be split like "
            f"{source.path!r} of shape {source.shape}, so each device holds it "
            f"whole: {why}.",
            stacklevel=2,
        )
    elif any(source.layout.axes):
        why = f"none of its dims is a split dim of {source.path!r}"
    else:
        why = f"{source.path!r} is replicated"
    variable._origin = variable._origin._replace(follows=why)
    return layout_like(axes, source.layout, () if obstacles else dims)


def derived_of(layer):
    """Yields the variables that LoRA and quantization added to a layer.

    As `(variable, dims, kernel)`. `dims` has, for each dim of the variable,
    the dim of the kernel that it follows, or `None`.
    """
    mode = layer.quantization_mode
    for variable in own_variables(layer):
        kernel, dims = _dims_of_follower(
            layer, mode, variable.name, tuple(variable.shape)
        )
        if kernel is not None and not isinstance(dims, str):
            yield variable, dims, kernel


def own_variables(layer):
    """Returns the variables of a layer, without those of layers inside it."""
    return layer._trainable_variables + layer._non_trainable_variables


def _follow(source, dims, shape):
    """Returns the axes of a variable, and why some source axes are dropped."""
    axes, obstacles = [None] * len(shape), []
    if not any(source.layout.axes):
        return axes, obstacles
    if isinstance(dims, str):
        return axes, [dims]
    for i, dim in enumerate(dims):
        axis = None if dim is None else source.layout.axes[dim]
        count = axis_size(source.layout.device_mesh, axis)
        # A dim of the same size is split as the kernel's is, if unevenly.
        is_alike = dim is not None and shape[i] == source.shape[dim]
        in_blocks = dim in getattr(source.layout, "blocks", {})
        if is_alike or shape[i] % count == 0 and not in_blocks:
            axes[i] = axis
        elif in_blocks:
            obstacles.append(
                f"dim {i} of size {shape[i]} does not have the blocks of dim "
                f"{dim}, of size {source.shape[dim]}"
            )
        else:
            obstacles.append(
                f"dim {i} holds the {source.shape[dim]} values of dim {dim} in "
                f"pairs, and its size {shape[i]} does not divide by {count}"
            )
    return axes, obstacles


def _dims_of_kernel(layer, mode, old, new):
    """Returns the dims of a kernel of shape `old` in its quantized form."""
    if mode not in _MODES:
        return f"the shape of a kernel in mode {mode!r} is not known"
    # int4 packs a dim of a matrix: two values in a byte.
    is_packed = len(old) == len(new) and not isinstance(layer, EinsumDense)
    if is_packed or old == new:
        return list(range(len(old)))
    # int4 reshapes the kernel of an EinsumDense, and packs its columns.
    rows, columns = _rows_and_columns(layer, len(old))
    if rows != list(range(len(rows))):
        return "its dims are regrouped to rows and columns"
    return [_outermost(rows, old), _outermost(columns, old)]


def _dims_of_follower(layer, mode, name, shape):
    """Returns the kernel that a variable of this name follows, and its dims."""
    found = _ADDED.fullmatch(name)
    attribute = _KERNELS.get(found and (found[1] or found[2]))
    if name == "g_idx":
        is_table = isinstance(layer, Embedding)
        attribute = "_embeddings" if is_table else "_kernel"
    kernel = getattr(layer, attribute, None) if attribute else None
    if kernel is None:
        return None, None
    if mode not in _MODES:
        return kernel, f"the variables of mode {mode!r} are not known"
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
