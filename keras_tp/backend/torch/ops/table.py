"""Handlers for operations that DTensor cannot split, or splits incorrectly.

`_HANDLERS` replaces DTensor's implementations of ATen operations, below
autograd: forward and backward have a handler each. `embedding` is wrapped in
`torch.nn.functional` instead, because its gradient depends on how the table is
split. `REPLICATED` lists the operations that every process computes whole.
"""

import functools

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Replicate
from torch.distributed.tensor import Shard
from torch.utils import _pytree as pytree

from keras_tp.backend.torch import local_tensors
from keras_tp.backend.torch import placement
from keras_tp.backend.torch import reading
from keras_tp.backend.torch.ops import conv_attention
from keras_tp.backend.torch.ops import index_update
from keras_tp.backend.torch.ops import random
from keras_tp.backend.torch.ops import vocab_parallel

aten = torch.ops.aten

# Operations that every process computes whole, by reason.
REPLICATED = {
    "data-dependent shape": (
        "bincount.default",
        "histogram.bin_ct",
        "masked_select.default",
        "allclose.default",
        "nonzero.default",
        "_unique2.default",
    ),
    "windows cross the borders of shards": (
        "col2im.default",
        "im2col.default",
        "unfold.default",
        "unfold_backward.default",
    ),
    "DTensor has no strategy for it, or none for its gradient": (
        "_adaptive_avg_pool2d.default",
        "_adaptive_avg_pool2d_backward.default",
        "_adaptive_avg_pool3d.default",
        "_adaptive_avg_pool3d_backward.default",
        "adaptive_max_pool2d.default",
        "adaptive_max_pool2d_backward.default",
        "adaptive_max_pool3d.default",
        "adaptive_max_pool3d_backward.default",
        "avg_pool2d.default",
        "avg_pool2d_backward.default",
        "avg_pool3d.default",
        "avg_pool3d_backward.default",
        "masked_scatter.default",
        "max_pool3d_with_indices.default",
        "max_pool3d_with_indices_backward.default",
        "native_group_norm.default",
        "native_group_norm_backward.default",
        "reflection_pad1d.default",
        "reflection_pad1d_backward.default",
        "reflection_pad2d.default",
        "reflection_pad2d_backward.default",
        "replication_pad1d.default",
        "replication_pad1d_backward.default",
        "replication_pad2d.default",
        "replication_pad2d_backward.default",
        "scatter_reduce.two",
        "unfold_copy.default",
        "_ctc_loss.default",
        "_ctc_loss.Tensor",
        "_ctc_loss_backward.default",
        "_ctc_loss_backward.Tensor",
    ),
    "a decomposition needs the whole matrix": (
        "linalg_lstsq.default",
        "linalg_lu_factor_ex.default",
        "linalg_solve_triangular.default",
    ),
    "DTensor's result is a sum of truth values": (
        "_is_all_true.default",
        "all.default",
        "all.dim",
        "all.dims",
        "any.default",
        "any.dim",
        "any.dims",
    ),
    "needs all of a sorted sequence": (
        "bucketize.Tensor",
        "searchsorted.Tensor",
    ),
    "one draw for all processes": (
        "binomial.default",
        "multinomial.default",
        "normal.Tensor_Tensor",
        "normal.Tensor_float",
        "normal.float_Tensor",
        "poisson.default",
        "_sample_dirichlet.default",
        "_standard_gamma.default",
        "_standard_gamma_grad.default",
    ),
}


def with_handlers(original):
    """Returns DTensor's dict of operations to handlers, with ours in it."""
    handlers = {**original, **_HANDLERS}
    for names in REPLICATED.values():
        for name in names:
            packet, overload = name.split(".")
            operation = getattr(getattr(aten, packet), overload)
            handlers[operation] = local_tensors.replicated
    return handlers


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

    DTensor's own cumulative sums restart in each shard. Its `topk` returns the
    shape of an earlier call with another `k`.
    """
    x, *rest = args
    names = [argument.name for argument in op._schema.arguments]
    given = {**dict(zip(names, args)), **kwargs}
    dim = given.get("dim", -1 if op is aten.topk.default else 0)
    dim %= max(x.ndim, 1)
    mesh = x.device_mesh
    placements = [
        placed if placed.is_shard() and placed.dim != dim else Replicate()
        for placed in x.placements
    ]
    results = op(local_tensors.local_part(x, mesh, placements), *rest, **kwargs)
    if op is aten.unbind.int:
        # The dims after the removed one move up.
        placements = [
            Shard(placed.dim - 1)
            if placed.is_shard() and placed.dim > dim
            else placed
            for placed in placements
        ]
    return pytree.tree_map_only(
        torch.Tensor,
        lambda result: local_tensors.wrap_parts(result, mesh, placements),
        results,
    )


def loss(op, args, kwargs):
    """Runs a loss, or its gradient, that is one operation in torch.

    A loss with a reduction is computed whole, because DTensor takes the mean
    over one device's shard.
    """
    names = [argument.name for argument in op._schema.arguments]
    given = {**dict(zip(names, args)), **kwargs}
    tensors = [t for t in (*args, *kwargs.values()) if torch.is_tensor(t)]
    shape = max((t.shape for t in tensors), key=len)
    alike = all(t.shape == shape for t in tensors)
    # 0 stands for "none".
    if given.get("reduction", 1) != 0 or not alike:
        return local_tensors.replicated(op, args, kwargs)
    mesh = local_tensors.mesh_of(args, kwargs)
    first = next(t for t in tensors if isinstance(t, DTensor))
    placements = [p if p.is_shard() else Replicate() for p in first.placements]
    args, kwargs = pytree.tree_map_only(
        torch.Tensor,
        lambda t: local_tensors.local_part(t, mesh, placements),
        (args, kwargs),
    )
    return local_tensors.wrap_parts(op(*args, **kwargs), mesh, placements)


def pointwise(op, args, kwargs):
    """Runs an elementwise operation on the shards.

    DTensor lacks the gradients of some activations.
    """
    mesh = local_tensors.mesh_of(args, kwargs)
    first = next(t for t in args if isinstance(t, DTensor))
    placements = [p if p.is_shard() else Replicate() for p in first.placements]
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
    return local_tensors.wrap_parts(op(*args, **kwargs), mesh, placements)


def added_up(op, args, kwargs):
    """Runs a reduction and all-reduces its partial result.

    The gradient compares with the full result, or divides by it.
    """
    return placement.settled(_own_way(op, args, kwargs))


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
    index_update.check_written(op, target)
    settled = placement.settled(target)
    target._local_tensor, target._spec = settled._local_tensor, settled._spec
    return _own_way(op, args, kwargs)


def index(op, args, kwargs):
    """Runs `x[indices]`, whole if a boolean mask makes the shape dynamic."""
    if any(
        torch.is_tensor(i) and i.dtype in (torch.bool, torch.uint8)
        for i in args[1]
    ):
        return local_tensors.replicated(op, args, kwargs)
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
        f"{op} draws as many numbers as its values ask for, which differ "
        "between devices. Apply it to a tensor that is not distributed, or "
        "write it with `keras.random`."
    )


_HANDLERS = {
    aten.convolution.default: conv_attention.convolution,
    aten.convolution_backward.default: conv_attention.convolution_backward,
    aten._scaled_dot_product_flash_attention_for_cpu.default: (
        conv_attention.cpu_attention
    ),
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default: (
        conv_attention.cpu_attention_backward
    ),
    aten._softmax.default: vocab_parallel.softmax,
    aten._softmax_backward_data.default: vocab_parallel.softmax_backward,
    aten._log_softmax.default: vocab_parallel.softmax,
    aten._log_softmax_backward_data.default: vocab_parallel.softmax_backward,
    aten.nll_loss_forward.default: vocab_parallel.class_loss,
    aten.nll_loss_backward.default: vocab_parallel.class_loss_backward,
    aten.nll_loss2d_forward.default: vocab_parallel.class_loss,
    aten.nll_loss2d_backward.default: vocab_parallel.class_loss_backward,
    aten.argmax.default: vocab_parallel.argmax,
    aten.logsumexp.default: vocab_parallel.logsumexp,
    aten.as_strided.default: index_update.strided_view,
    aten.bernoulli_.float: random.random_in_place,
    aten.bernoulli_.Tensor: random.random_in_place,
    aten.normal_.default: random.random_in_place,
    aten.uniform_.default: random.random_in_place,
    aten.exponential_.default: random.random_in_place,
    aten.random_.default: random.random_in_place,
    aten.random_.to: random.random_in_place,
    getattr(aten.random_, "from"): random.random_in_place,
    aten.bernoulli.default: random.random_like,
    aten.bernoulli.p: random.random_like,
    aten.rand_like.default: random.random_like,
    aten.randn_like.default: random.random_like,
    aten.randint_like.default: random.random_like,
    aten.randint_like.low_dtype: random.random_like,
    aten.native_dropout.default: random.native_dropout,
    aten.cauchy_.default: random.random_in_place,
    aten.geometric_.default: random.random_in_place,
    aten.log_normal_.default: random.random_in_place,
    aten.rrelu_with_noise.default: refused,
    aten.rrelu_with_noise_.default: refused,
    aten.binary_cross_entropy.default: loss,
    aten.binary_cross_entropy_backward.default: loss,
    aten.binary_cross_entropy_with_logits.default: loss,
    aten.huber_loss.default: loss,
    aten.huber_loss_backward.default: loss,
    aten.index.Tensor: index,
    aten.mse_loss.default: loss,
    aten.mse_loss_backward.default: loss,
    aten.smooth_l1_loss.default: loss,
    aten.smooth_l1_loss_backward.default: loss,
    aten.soft_margin_loss.default: loss,
    aten.soft_margin_loss_backward.default: loss,
    aten.cummax.default: along_dim,
    aten.cummin.default: along_dim,
    aten.cumprod.default: along_dim,
    aten.cumsum.default: along_dim,
    aten.logcumsumexp.default: along_dim,
    aten.topk.default: along_dim,
    aten.unbind.int: along_dim,
    aten._local_scalar_dense.default: reading.number,
    **dict.fromkeys(
        (
            aten.hardshrink_backward.default,
            aten.hardsigmoid_backward.default,
            aten.hardswish_backward.default,
            aten.hardtanh_backward.default,
            aten.log_sigmoid_backward.default,
            aten.softshrink_backward.default,
        ),
        pointwise,
    ),
    **dict.fromkeys(
        (
            aten.amax.default,
            aten.amin.default,
            aten.prod.default,
            aten.prod.dim_int,
        ),
        added_up,
    ),
    **dict.fromkeys(
        (
            aten.add_.Scalar,
            aten.add_.Tensor,
            aten.copy_.default,
            aten.div_.Scalar,
            aten.div_.Tensor,
            aten.index_put_.default,
            aten.masked_fill_.Scalar,
            aten.masked_fill_.Tensor,
            aten.mul_.Scalar,
            aten.mul_.Tensor,
            aten.pow_.Scalar,
            aten.pow_.Tensor,
            aten.sub_.Scalar,
            aten.sub_.Tensor,
            aten.zero_.default,
        ),
        in_place,
    ),
    **dict.fromkeys(index_update.FILLS, index_update.fill),
}
