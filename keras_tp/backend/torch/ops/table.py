"""Handlers for operations that DTensor cannot split, or splits incorrectly.

They replace DTensor's implementations of ATen operations, below autograd:
forward and backward have a handler each. `embedding` is wrapped in
`torch.nn.functional` instead, because its gradient depends on how the table is
split.
"""

import functools

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Partial
from torch.distributed.tensor import Replicate
from torch.distributed.tensor import Shard
from torch.utils import _pytree as pytree

from keras_tp.backend.torch import local_tensors
from keras_tp.backend.torch import placement
from keras_tp.backend.torch import reading
from keras_tp.backend.torch.ops import conv_attention
from keras_tp.backend.torch.ops import random
from keras_tp.backend.torch.ops import vocab_parallel
from keras_tp.backend.torch.ops import writes

aten = torch.ops.aten


def whole(function):
    """Wraps a function to receive whole plain tensors, on every process.

    Used for functions that write into a new plain tensor, which cannot hold
    split values.
    """

    @functools.wraps(function)
    def call(*args, **kwargs):
        leaves = pytree.tree_leaves((args, kwargs))
        if any(isinstance(leaf, DTensor) for leaf in leaves):
            return local_tensors.replicated(function, args, kwargs)
        return function(*args, **kwargs)

    return call


def whole_vmap(original):
    """Wraps `torch.vmap`: the mapped function receives whole plain tensors.

    DTensor has no rules for the batched operations that `vmap` makes.
    """

    @functools.wraps(original)
    def vmap(*args, **kwargs):
        return whole(original(*args, **kwargs))

    return vmap


def along_dim(op, args, kwargs):
    """Runs an operation that needs one dim whole; other dims stay split.

    DTensor's own cumulative sums restart in each shard.
    """
    x, *rest = args
    given = _arguments(op, args, kwargs)
    dim = given.get("dim", 0) % max(x.ndim, 1)
    mesh = x.device_mesh
    placements = [
        placed if placed.is_shard() and placed.dim != dim else Replicate()
        for placed in x.placements
    ]
    results = op(local_tensors.local_part(x, mesh, placements), *rest, **kwargs)
    sizes = list(x.shape)
    if op is aten.unbind.int:
        del sizes[dim]
        # The dims after the removed one move up.
        placements = [
            Shard(placed.dim - 1)
            if placed.is_shard() and placed.dim > dim
            else placed
            for placed in placements
        ]
    return pytree.tree_map_only(
        torch.Tensor,
        lambda result: local_tensors.wrap_parts(
            result, mesh, placements, sizes
        ),
        results,
    )


def _arguments(op, args, kwargs):
    names = [argument.name for argument in op._schema.arguments]
    return {**dict(zip(names, args)), **kwargs}


# torch's numbers for the reductions of its losses.
_NONE, _MEAN, _SUM = range(3)


def loss(op, args, kwargs):
    """Runs a loss, or its gradient, that is one operation in torch.

    Each process runs it on its shard, and a mean is weighted by the shard's
    size. DTensor's is not: it is wrong in the gradient, and for shards of
    several sizes.
    """
    given = _arguments(op, args, kwargs)
    tensors = [t for t in given.values() if torch.is_tensor(t)]
    x = max(tensors, key=lambda t: t.ndim)
    alike = [t for t in tensors if t.shape == x.shape]
    # The gradient of a mean is whole: it must not gather the others.
    first = max(
        (t for t in alike if isinstance(t, DTensor)),
        key=lambda t: sum(placed.is_shard() for placed in t.placements),
        default=None,
    )
    # A loss with a reduction has a gradient that is a number.
    others = [t for t in tensors if t.shape != x.shape and t.ndim]
    if first is None or others:
        return local_tensors.replicated(op, args, kwargs)
    reduction = given.get("reduction", _MEAN)
    mesh = first.device_mesh
    placements = placement.summed(first.placements)
    given = {
        name: local_tensors.local_part(value, mesh, placements)
        if torch.is_tensor(value) and value.shape == x.shape
        else placement.to_full(value)
        for name, value in given.items()
    }
    count = max(t.numel() for t in given.values() if torch.is_tensor(t))
    if reduction == _MEAN and not count:
        # An empty shard has no mean.
        given["reduction"] = _SUM
    local = op(**given)
    if reduction == _MEAN:
        # Not a sum divided by the size, which float16 may not hold.
        local = local * (count / x.numel())
    if reduction == _NONE or op.name().partition(".")[0].endswith("_backward"):
        return local_tensors.wrap_parts(local, mesh, placements, x.shape)
    placements = [
        Partial() if placed.is_shard() else placed for placed in placements
    ]
    return local_tensors.settled_parts(local, mesh, placements)


def pool_backward(op, args, kwargs):
    """Runs the gradient of a pooling on the shards.

    Samples and channels stay split. The dims of the windows are gathered.
    """
    gradient, x, *_ = args
    mesh = local_tensors.mesh_of(args, kwargs)
    windows = int(op.name().partition("d_")[0][-1])
    placements = [
        placed
        if placed.is_shard() and placed.dim < x.ndim - windows
        else Replicate()
        for placed in local_tensors.placements_of(x, mesh)
    ]
    args, kwargs = pytree.tree_map_only(
        torch.Tensor,
        lambda t: local_tensors.local_part(t, mesh, placements),
        (args, kwargs),
    )
    return local_tensors.wrap_parts(
        op(*args, **kwargs), mesh, placements, x.shape
    )


def pointwise(op, args, kwargs):
    """Runs an elementwise operation on the shards.

    DTensor lacks the gradients of some activations.
    """
    leaves = pytree.tree_leaves((args, kwargs))
    first = next(leaf for leaf in leaves if isinstance(leaf, DTensor))
    mesh, placements = first.device_mesh, placement.summed(first.placements)
    # A tensor of another shape is empty: a buffer for other device types.
    args, kwargs = pytree.tree_map_only(
        torch.Tensor,
        lambda t: (
            local_tensors.local_part(t, mesh, placements)
            if t.shape == first.shape
            else placement.to_full(t)
        ),
        (args, kwargs),
    )
    return local_tensors.wrap_parts(
        op(*args, **kwargs), mesh, placements, first.shape
    )


def expand(op, args, kwargs):
    """Repeats values; partial sums are all-reduced while they are small."""
    x, *rest = args
    return _own_way(op, (placement.settled(x), *rest), kwargs)


def scatter(op, args, kwargs):
    """Writes into a copy of a tensor; partial sums are all-reduced first.

    It is the gradient of `topk`. DTensor would scatter the sums, and gather the
    larger result.
    """
    x, dim, places, values = args
    return _own_way(op, (x, dim, places, placement.settled(values)), kwargs)


def added_up(op, args, kwargs):
    """Runs a reduction and all-reduces its partial result.

    The gradient compares with the full result, or divides by it.
    """
    return placement.settled(_own_way(op, args, kwargs))


def joined(op, args, kwargs):
    """Joins tensors; partial results of several kinds are completed first.

    DTensor would give all of them one kind. It refuses that for a sum and a
    mean, and gives wrong numbers for a norm and a tensor that is whole.
    """
    tensors, *rest = args
    kinds = {t.placements for t in tensors if isinstance(t, DTensor)}
    if len(kinds) > 1 or not all(isinstance(t, DTensor) for t in tensors):
        tensors = [placement.settled(t) for t in tensors]
    return _own_way(op, (tensors, *rest), kwargs)


def all_dims(original):
    """Wraps `_infer_reduction_dims`: an empty list stands for all dims.

    torch reads an empty list that way, also in the gradient of `amax`. DTensor
    assumes that no dim is reduced, and each process keeps its partial result.
    """

    @functools.wraps(original)
    def dims_of(dims, ndim):
        is_empty = isinstance(dims, (list, tuple)) and not dims
        return original(None if is_empty else dims, ndim)

    return dims_of


def in_place(op, args, kwargs):
    """Runs an operation that writes into its first argument.

    Values for a plain tensor are gathered first, and partial sums in a DTensor
    target are all-reduced first; DTensor raises in both cases.
    """
    target, *rest = args
    if not isinstance(target, DTensor):
        rest, kwargs = pytree.tree_map_only(
            DTensor, placement.to_full, (rest, kwargs)
        )
        return op(target, *rest, **kwargs)
    writes.written_to(op, target)
    return _own_way(op, args, kwargs)


def index(op, args, kwargs):
    """Runs `x[indices]`, whole if a boolean mask makes the shape dynamic."""
    if any(
        torch.is_tensor(i) and i.dtype in (torch.bool, torch.uint8)
        for i in args[1]
    ):
        return local_tensors.replicated(op, args, kwargs)
    return _own_way(op, args, kwargs)


def select_backward(op, args, kwargs):
    """Returns the gradient of `x.select(dim, index)`.

    For a negative dim DTensor returns shards of the wrong size.
    """
    gradient, sizes, dim, *rest = args
    args = (gradient, sizes, dim % len(sizes), *rest)
    return _own_way(op, args, kwargs)


def _own_way(op, args, kwargs):
    """Runs DTensor's own implementation of an operation."""
    handlers = DTensor._op_dispatcher._custom_op_handlers
    handler = handlers.pop(op)
    try:
        return op(*args, **kwargs)
    finally:
        handlers[op] = handler


def refused(op, args, kwargs):
    """Raises: the numbers drawn would depend on the number of devices."""
    raise NotImplementedError(
        f"The random numbers of {op} depend on the values of its input, which "
        "differ between devices. Apply it to a tensor that is not distributed, "
        "or use `keras.random`."
    )


# What every process computes whole, by reason.
REPLICATED = {
    "data-dependent shape": (
        "bincount histogram.bin_ct masked_select allclose nonzero _unique2"
    ),
    "windows cross the borders of shards": (
        "col2im im2col unfold unfold_backward"
    ),
    "DTensor has no strategy for it, or none for its gradient": (
        "native_group_norm_backward "
        "reflection_pad1d reflection_pad1d_backward "
        "reflection_pad2d reflection_pad2d_backward "
        "replication_pad1d replication_pad1d_backward "
        "replication_pad2d replication_pad2d_backward "
        "masked_scatter scatter_reduce.two unfold_copy _ctc_loss "
        "_ctc_loss.Tensor _ctc_loss_backward _ctc_loss_backward.Tensor"
    ),
    "a decomposition needs the whole matrix": (
        "linalg_lstsq linalg_lu_factor_ex linalg_solve_triangular"
    ),
    "DTensor's result is a sum of truth values": (
        "_is_all_true all all.dim all.dims any any.dim any.dims"
    ),
    "needs all of a sorted sequence": "bucketize.Tensor searchsorted.Tensor",
    "one draw for all processes": (
        "binomial normal.Tensor_Tensor normal.Tensor_float "
        "normal.float_Tensor poisson _sample_dirichlet _standard_gamma "
        "_standard_gamma_grad"
    ),
}

# Handler -> what it runs. Names without an overload have the default one.
_OPERATIONS = {
    local_tensors.replicated: " ".join(REPLICATED.values()),
    local_tensors.even_only(conv_attention.convolution): "convolution",
    local_tensors.even_only(
        conv_attention.convolution_backward
    ): "convolution_backward",
    local_tensors.even_only(conv_attention.cpu_attention): (
        "_scaled_dot_product_flash_attention_for_cpu "
        "_scaled_dot_product_flash_attention_for_cpu_backward"
    ),
    vocab_parallel.softmax: "_softmax _log_softmax",
    vocab_parallel.softmax_backward: (
        "_softmax_backward_data _log_softmax_backward_data"
    ),
    vocab_parallel.class_loss: "nll_loss_forward nll_loss2d_forward",
    vocab_parallel.class_loss_backward: "nll_loss_backward nll_loss2d_backward",
    vocab_parallel.argmax: "argmax",
    vocab_parallel.logsumexp: "logsumexp",
    vocab_parallel.multinomial: "multinomial",
    # DTensor's own returns the shape of an earlier call with another `k`.
    vocab_parallel.topk: "topk",
    random.random_in_place: (
        "bernoulli_.float bernoulli_.Tensor cauchy_ exponential_ geometric_ "
        "log_normal_ normal_ random_ random_.from random_.to uniform_"
    ),
    random.random_like: (
        "bernoulli bernoulli.p rand_like randn_like randint_like "
        "randint_like.low_dtype"
    ),
    random.native_dropout: "native_dropout",
    refused: "rrelu_with_noise rrelu_with_noise_",
    loss: (
        "binary_cross_entropy binary_cross_entropy_backward "
        "binary_cross_entropy_with_logits huber_loss huber_loss_backward "
        "mse_loss mse_loss_backward smooth_l1_loss smooth_l1_loss_backward "
        "soft_margin_loss soft_margin_loss_backward"
    ),
    pointwise: (
        "hardshrink_backward hardsigmoid_backward hardswish_backward "
        "hardtanh_backward log_sigmoid_backward softshrink_backward"
    ),
    along_dim: "cumprod cumsum logcumsumexp unbind.int",
    expand: "expand",
    scatter: "scatter.src",
    added_up: "amax amin prod prod.dim_int",
    joined: "cat stack",
    pool_backward: (
        "_adaptive_avg_pool3d_backward adaptive_max_pool2d_backward "
        "adaptive_max_pool3d_backward avg_pool2d_backward avg_pool3d_backward "
        "max_pool3d_with_indices_backward"
    ),
    index: "index.Tensor",
    select_backward: "select_backward",
    in_place: (
        "add_.Scalar add_.Tensor copy_ div_.Tensor index_put_ "
        "masked_fill_.Scalar masked_fill_.Tensor mul_.Scalar mul_.Tensor "
        "pow_.Scalar pow_.Tensor sub_.Tensor zero_"
    ),
    writes.along_index: (
        "index_add_ index_copy_ index_fill_.int_Scalar index_fill_.int_Tensor "
        "scatter_.src scatter_.value scatter_add_"
    ),
    writes.new_zeros: "new_zeros",
    writes.fill: "fill_.Scalar fill_.Tensor",
    writes.strided_view: "as_strided",
    reading.number: "_local_scalar_dense",
}


def with_handlers(original):
    """Returns DTensor's dict of operations to handlers, with ours in it."""
    handlers = dict(original)
    for handler, names in _OPERATIONS.items():
        for name in names.split():
            packet, _, overload = name.partition(".")
            operation = getattr(getattr(aten, packet), overload or "default")
            handlers[operation] = handler
    return handlers
