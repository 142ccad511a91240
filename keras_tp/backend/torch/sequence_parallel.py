"""Sequence parallelism: the two operations around a pair of split kernels.

`backend/sequence_parallel.py` says where activations are split along the
sequence. Here an input is gathered before a column-parallel product, and the
partial sums of a row-parallel product or lookup are reduce-scattered.
"""

import contextlib
import weakref

import torch
from keras.src.backend.common import global_state
from keras.src.layers.layer import Layer
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Replicate
from torch.distributed.tensor import Shard
from torch.utils import _python_dispatch as dispatch
from torch.utils import checkpoint

from keras_tp.backend.sequence_parallel import SEQUENCE
from keras_tp.backend.sequence_parallel import axis_of
from keras_tp.backend.torch import local_tensors
from keras_tp.backend.torch import overlap
from keras_tp.backend.torch import placement

_SPLIT = Shard(SEQUENCE)
# Attribute of an input: the `_Gathered` of it.
_ATTRIBUTE = "_gathered_sequence"
_SAVING_MODES = (
    checkpoint._CachingTorchDispatchMode,
    checkpoint._CachedTorchDispatchMode,
)


def gathered(x, kernel):
    """Returns the input of a product, gathered along the sequence if needed.

    It is gathered once for all products that read it, such as those of queries,
    keys and values. Their gradients are added up as partial sums, and one
    reduce-scatter gives the gradient of `x`.

    Args:
        x: DTensor, the first operand of a product.
        kernel: DTensor, the second operand.

    Returns:
        `x` itself if it stays as it is: its sequence is whole, the kernel is
        not split, or its layer does not use sequence parallelism.
    """
    if x.ndim != 3 or _SPLIT not in x.placements:
        return x
    if torch.compiler.is_compiling():
        return x
    dim = _mesh_dim(x)
    if (
        dim is None
        or x.placements[dim] != _SPLIT
        or not placement.is_shard(kernel.placements[dim])
    ):
        return x
    whole = gathered_by(x)
    if whole is None:
        local = _copied(x)
        with _not_saved():
            whole = _Gather.apply(x, _with(x, dim, Replicate()), local)
        if whole.requires_grad:
            if overlap.number_below(x) is None:
                x.register_hook(overlap.complete)
            overlap.run_first(whole)
        _keep(x, whole)
    return whole


def gathered_by(x):
    """Returns `x`, gathered by another product; `None` if it has to be."""
    held = vars(x).get(_ATTRIBUTE)
    return None if held is None else held.value(x)


def forget():
    """Frees the copy of the last input that a function gathered again."""
    _last.copied = None


def reduced(tensor):
    """Returns the result of a layer's product with its partial sums added up.

    With sequence parallelism they are reduce-scattered along the sequence, and
    the gradient is all-gathered. Without it, they are all-reduced.

    Args:
        tensor: DTensor, or another value, which is returned as it is.
    """
    if (
        isinstance(tensor, DTensor)
        and tensor.ndim == 3
        and any(placed.is_partial() for placed in tensor.placements)
        and _SPLIT not in tensor.placements
        and not torch.compiler.is_compiling()
    ):
        dim = _mesh_dim(tensor)
        if dim is not None and tensor.placements[dim].is_partial():
            placements = placement.summed(_with(tensor, dim, _SPLIT))
            # A reduce-scatter returns a contiguous tensor, as an all-reduce.
            return tensor.contiguous().redistribute(placements=placements)
    return placement.settled(tensor)


class _Gather(torch.autograd.Function):
    """An all-gather; its gradient is a reduce-scatter of partial sums."""

    @staticmethod
    def forward(ctx, x, placements, local):
        ctx.placements = x.placements
        if local is None:
            return x.redistribute(placements=placements)
        return local_tensors.wrap_parts(
            local, x.device_mesh, placements, x.shape
        )

    @staticmethod
    def backward(ctx, gradient):
        # The reduce-scatter is only launched. A hook of `x` waits for it.
        gradient = gradient.redistribute(
            placements=ctx.placements, async_op=not torch.is_grad_enabled()
        )
        return gradient, None, None


class _Gathered:
    """An attribute of an input: the gathered input, for all that read it.

    Args:
        x: DTensor, the input.
        whole: DTensor, the gathered input.
    """

    def __init__(self, x, whole):
        self.whole, self._version = whole, _version(x)

    def value(self, x):
        """Returns the gathered input; `None` if it is gone or out of date."""
        whole = self.whole
        if whole is None or self._version != _version(x):
            return None
        if whole.requires_grad != (x.requires_grad and torch.is_grad_enabled()):
            return None
        return whole


class _Last:
    """What the last gather left.

    Attributes:
        held: Weak reference to a `_Gathered` that the next gather frees.
        copied: Pair of local tensors, of an input and of it gathered, in a
            function that is computed again.
    """

    held = staticmethod(lambda: None)
    copied = None


_last = _Last()


def _keep(x, whole):
    """Keeps a gathered input for the other products that read it.

    Processes have to agree on what is kept, or one waits for a gather that
    another does not enter. So nothing here depends on when Python frees a
    tensor. In training autograd needs it, and it is kept as long as `x`.
    Otherwise, the next gather frees it.
    """
    held = _Gathered(x, whole)
    setattr(x, _ATTRIBUTE, held)
    again = _is_computed_again()
    if again or not whole.requires_grad:
        before = _last.held()
        if before is not None:
            before.whole = None
        _last.held = weakref.ref(held)
    if again:
        _last.copied = x._local_tensor, whole._local_tensor


def _version(x):
    """Returns the number of writes into a tensor, if torch counts them."""
    return None if x.is_inference() else x._version


def _with(tensor, dim, placed):
    """Returns the placements of a tensor with another one on a mesh dim."""
    placements = list(tensor.placements)
    placements[dim] = placed
    return tuple(placements)


def _mesh_dim(tensor):
    """Returns the mesh dim that splits an activation of the current layer.

    Returns `None` if no mesh dim splits its sequence.
    """
    axis = axis_of(_layout_of_layer(), tuple(tensor.shape))
    # A mesh of the user's own may have no names.
    names = tensor.device_mesh.mesh_dim_names or ()
    return names.index(axis) if axis in names else None


def _layout_of_layer():
    """Returns the layout of a kernel, of the layer whose call is under way.

    A product may read a copy of the kernel: cast, transposed or dequantized.
    So the layer is asked, instead of the tensor. Returns `None` unless a kernel
    of the layer uses sequence parallelism.
    """
    scopes = global_state.get_global_attribute("name_scope_stack")
    layer = scopes[-1].caller if scopes else None
    if not isinstance(layer, Layer):
        return None
    for variables in (
        layer._trainable_variables,
        layer._non_trainable_variables,
    ):
        for variable in variables:
            # Layouts of Keras have no such attribute.
            if getattr(variable._layout, "sequence_parallel", False):
                return variable._layout
    return None


def _copied(x):
    """Returns the local tensor of the last gathered input if `x` is a copy.

    A function that is computed again, inside of another one, has copies of its
    inputs that share their memory.
    """
    if _last.copied is None or not _is_computed_again():
        return None
    own, (part, whole) = x._local_tensor, _last.copied
    if own.data_ptr() != part.data_ptr() or own.dtype != part.dtype:
        return None
    if own.shape != part.shape or own.stride() != part.stride():
        return None
    return whole


def _is_computed_again():
    """Returns whether `rematerialization` watches the operations now."""
    return isinstance(dispatch._get_current_dispatch_mode(), _SAVING_MODES)


@contextlib.contextmanager
def _not_saved():
    """Context whose operations `rematerialization` neither saves nor counts.

    It would keep all gathered inputs, which are whole activations. So they are
    gathered again. A function may gather an input when it runs first and find
    it gathered the next time, or the other way round.
    """
    with contextlib.ExitStack() as stack:
        while _is_computed_again():
            stack.enter_context(dispatch._pop_mode_temporarily())
        yield
