"""Operations that DTensor does not split, or does not split as one process.

`HANDLERS` take the place of DTensor's own way for an ATen operation, which is
below the gradient: forward and backward have a handler each. `embedding` is a
function of `torch.nn.functional`, because its gradient has to know how the
table is split. `REPLICATED` is the list of what every process computes whole.
"""

import functools

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Partial
from torch.distributed.tensor import Replicate
from torch.distributed.tensor import Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._dtensor_spec import TensorMeta
from torch.distributed.tensor._utils import compute_global_tensor_info
from torch.distributed.tensor._utils import (
    compute_local_shape_and_global_offset,
)
from torch.utils import _pytree as pytree

from keras_tp.backend.torch import placement

aten = torch.ops.aten

# Computed whole on every process, and why.
REPLICATED = {
    "data-dependent shape": (
        "bincount.default",
        "masked_select.default",
        "nonzero.default",
        "_unique2.default",
        "unique_consecutive.default",
        "unique_dim.default",
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
        "_cdist_backward.default",
        "_cdist_forward.default",
        "_prelu_kernel.default",
        "_prelu_kernel_backward.default",
        "adaptive_max_pool2d.default",
        "adaptive_max_pool2d_backward.default",
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
        "renorm.default",
        "replication_pad1d.default",
        "replication_pad1d_backward.default",
        "replication_pad2d.default",
        "replication_pad2d_backward.default",
    ),
    "DTensor's result is a sum of truth values": (
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
    ),
}


class DTensorState:
    """DTensor's global state as attributes, so that hooks can name it.

    `aten.<operation>.<overload>` is the handler of an operation (`None`: the
    operation goes DTensor's own way), and `implicit_replication` whether plain
    tensors may meet DTensors. The latter is a setting of each thread.
    """

    @property
    def __dict__(self):
        found = {str(op): f for op, f in self._handlers().items()}
        found["implicit_replication"] = (
            DTensor._op_dispatcher._allow_implicit_replication
        )
        return found

    def __getattr__(self, name):
        return self.__dict__.get(name)

    def __setattr__(self, name, value):
        if name == "implicit_replication":
            DTensor._op_dispatcher._allow_implicit_replication = value
        else:
            self._handlers()[_operation(name)] = value

    def __delattr__(self, name):
        del self._handlers()[_operation(name)]

    def _handlers(self):
        return DTensor._op_dispatcher._custom_op_handlers


dtensor_state = DTensorState()


def handler_table():
    """Returns a dict of an ATen operation's name to what runs it."""
    handlers = {str(op): handler for op, handler in _HANDLERS.items()}
    for names in REPLICATED.values():
        for name in names:
            handlers[f"aten.{name}"] = replicated
    return handlers


def _operation(name):
    _, packet, overload = name.split(".")
    return getattr(getattr(aten, packet), overload)


def replicated(op, args, kwargs):
    """Runs an operation whole on every process.

    Args:
        op: ATen operation that writes to none of its arguments.
        args: Tuple of its arguments, DTensors among them.
        kwargs: Dict of its keyword arguments.

    Returns:
        What the operation returns, with replicated DTensors.
    """
    mesh = _mesh_of(args, kwargs)
    args, kwargs = pytree.tree_map_only(
        DTensor, placement.to_full, (args, kwargs)
    )
    return pytree.tree_map_only(
        torch.Tensor,
        lambda result: placement.replicate(result, mesh),
        op(*args, **kwargs),
    )


def along_dim(op, args, kwargs):
    """Runs an operation that needs one dim whole, and only that one.

    DTensor's own cumulative sums begin anew in each shard.
    """
    x, *rest = args
    dim = (rest[0] if rest else kwargs.get("dim", 0)) % max(x.ndim, 1)
    mesh = x.device_mesh
    placements = [
        placed if placed.is_shard() and placed.dim != dim else Replicate()
        for placed in x.placements
    ]
    results = op(_local(x, mesh, placements), *rest, **kwargs)
    if op is aten.unbind.int:
        # The dims behind it move up.
        placements = [
            Shard(placed.dim - 1)
            if placed.is_shard() and placed.dim > dim
            else placed
            for placed in placements
        ]
    return pytree.tree_map_only(
        torch.Tensor,
        lambda result: _wrap(result, mesh, placements),
        results,
    )


def loss(op, args, kwargs):
    """Runs a loss, or its gradient, that torch has as one operation.

    Where it reduces, it is computed whole: DTensor takes the mean over the
    part of one device.
    """
    names = [argument.name for argument in op._schema.arguments]
    given = {**dict(zip(names, args)), **kwargs}
    tensors = [t for t in (*args, *kwargs.values()) if torch.is_tensor(t)]
    shape = max((t.shape for t in tensors), key=len)
    alike = all(t.shape == shape for t in tensors)
    # 0 stands for "none".
    if given.get("reduction", 1) != 0 or not alike:
        return replicated(op, args, kwargs)
    mesh = _mesh_of(args, kwargs)
    first = next(t for t in tensors if isinstance(t, DTensor))
    placements = [p if p.is_shard() else Replicate() for p in first.placements]
    args, kwargs = pytree.tree_map_only(
        torch.Tensor, lambda t: _local(t, mesh, placements), (args, kwargs)
    )
    return _wrap(op(*args, **kwargs), mesh, placements)


def index(op, args, kwargs):
    """Runs `x[indices]`; a boolean mask makes a shape nobody knows before."""
    if any(
        torch.is_tensor(i) and i.dtype in (torch.bool, torch.uint8)
        for i in args[1]
    ):
        return replicated(op, args, kwargs)
    return _own_way(op, args, kwargs)


def _own_way(op, args, kwargs):
    """Runs an operation as DTensor does without a handler."""
    handlers = DTensor._op_dispatcher._custom_op_handlers
    handler = handlers.pop(op)
    try:
        return op(*args, **kwargs)
    finally:
        handlers[op] = handler


def refused(op, args, kwargs):
    """Raises, where the numbers would depend on the number of devices."""
    raise NotImplementedError(
        f"{op} draws as many numbers as its values ask for, which differ "
        "between devices. Apply it to a tensor that is not distributed, or "
        "write it with `keras.random`."
    )


# Convolutions. Of each mesh dim, one of these is chosen; the letters stand for
# the channels that it splits (Keras's kernel is (*window, in, out)):
#   column: the kernel's outputs. Each process makes its part of the channels.
#   row: the kernel's inputs. The parts of the sum are added up.
#   groups: both, where each process has whole groups (depthwise).
#   data: the batch.
#   whole: nothing; every process computes all of it.


def convolution(op, args, kwargs):
    """Runs a convolution, transposed or not, on this process's part."""
    (x, weight, bias, stride, padding, dilation, transposed, output_padding) = (
        args[:8]
    )
    groups = args[8]
    mesh = _mesh_of(args, kwargs)
    modes = _convolution_modes(x, weight, transposed, groups)
    plan = _convolution_plan(modes, transposed)
    local_x = _local(x, mesh, plan["x"])
    local_weight = _local(weight, mesh, plan["weight"])
    # Where a sum is split, its parts must not each add the bias.
    add_bias = bias is not None and "row" in modes
    local_bias = None
    if bias is not None and not add_bias:
        local_bias = _local(bias, mesh, plan["bias"])
    result = op(
        local_x,
        local_weight,
        local_bias,
        stride,
        padding,
        dilation,
        transposed,
        output_padding,
        _local_groups(groups, modes, mesh),
    )
    result = _settled(result, mesh, plan["result"])
    if add_bias:
        shape = (1, -1) + (1,) * (x.ndim - 2)
        bias = _local(bias, mesh, plan["bias"]).reshape(shape)
        result = _wrap(result._local_tensor + bias, mesh, result.placements)
    return result


def convolution_backward(op, args, kwargs):
    """Returns the gradients of `convolution`, partial where they are sums."""
    (gradient, x, weight, bias_sizes, stride, padding, dilation) = args[:7]
    transposed, output_padding, groups, mask = args[7:]
    mesh = _mesh_of(args, kwargs)
    modes = _convolution_modes(x, weight, transposed, groups)
    plan = _convolution_plan(modes, transposed)
    whole = [Replicate() if p.is_partial() else p for p in plan["result"]]
    local_gradient = _local(gradient, mesh, whole)
    if bias_sizes is not None:
        channels = local_gradient.shape[1]
        bias_sizes = [channels]
    results = op(
        local_gradient,
        _local(x, mesh, plan["x"]),
        _local(weight, mesh, plan["weight"]),
        bias_sizes,
        stride,
        padding,
        dilation,
        transposed,
        output_padding,
        _local_groups(groups, modes, mesh),
        mask,
    )
    placements = (
        plan["x_gradient"],
        plan["weight_gradient"],
        plan["bias_gradient"],
    )
    return tuple(
        None if result is None else _wrap(result, mesh, placed)
        for result, placed in zip(results, placements)
    )


def _convolution_modes(x, weight, transposed, groups):
    """Returns how each mesh dim splits a convolution, from its arguments."""
    mesh = _mesh_of((x, weight), {})
    x_placements = _placements(x, mesh)
    weight_placements = _placements(weight, mesh)
    out_dim, in_dim = (1, 0) if transposed else (0, 1)
    left = groups
    modes = []
    for dim in range(mesh.ndim):
        size = mesh.size(dim)
        of_x, of_weight = x_placements[dim], weight_placements[dim]
        mode = "whole"
        if of_x == Shard(0):
            mode = "data"
        elif groups == 1:
            if of_weight == Shard(out_dim):
                mode = "column"
            elif of_weight == Shard(in_dim):
                mode = "row"
        elif left % size == 0 and Shard(0) == of_weight:
            # The first dim of the kernel goes through the groups in order.
            mode = "groups"
            left //= size
        modes.append(mode)
    return modes


def _convolution_plan(modes, transposed):
    """Returns placements of arguments, result and gradients, by name."""
    out_dim, in_dim = (1, 0) if transposed else (0, 1)
    rows = {
        "column": {
            "x": Replicate(),
            "weight": Shard(out_dim),
            "bias": Shard(0),
            "result": Shard(1),
            "x_gradient": Partial(),
            "weight_gradient": Shard(out_dim),
            "bias_gradient": Shard(0),
        },
        "row": {
            "x": Shard(1),
            "weight": Shard(in_dim),
            "bias": Replicate(),
            "result": Partial(),
            "x_gradient": Shard(1),
            "weight_gradient": Shard(in_dim),
            "bias_gradient": Replicate(),
        },
        "groups": {
            "x": Shard(1),
            "weight": Shard(0),
            "bias": Shard(0),
            "result": Shard(1),
            "x_gradient": Shard(1),
            "weight_gradient": Shard(0),
            "bias_gradient": Shard(0),
        },
        "data": {
            "x": Shard(0),
            "weight": Replicate(),
            "bias": Replicate(),
            "result": Shard(0),
            "x_gradient": Shard(0),
            "weight_gradient": Partial(),
            "bias_gradient": Partial(),
        },
        "whole": dict.fromkeys(
            (
                "x",
                "weight",
                "bias",
                "result",
                "x_gradient",
                "weight_gradient",
                "bias_gradient",
            ),
            Replicate(),
        ),
    }
    return {
        name: [rows[mode][name] for mode in modes] for name in rows["whole"]
    }


def _local_groups(groups, modes, mesh):
    for dim, mode in enumerate(modes):
        if mode == "groups":
            groups //= mesh.size(dim)
    return groups


def cpu_attention(op, args, kwargs):
    """Runs flash attention of the CPU on this process's batch and heads."""
    mesh = _mesh_of(args, kwargs)
    placements = _attention_placements(args[:3], mesh)
    query, key, value = (_local(t, mesh, placements) for t in args[:3])
    kwargs = dict(kwargs)
    if kwargs.get("attn_mask") is not None:
        kwargs["attn_mask"] = _local_mask(
            kwargs["attn_mask"], args[0].ndim, mesh, placements
        )
    result, logsumexp = op(query, key, value, *args[3:], **kwargs)
    # Both have the batch first and the heads second.
    return (
        _wrap(result, mesh, placements),
        _wrap(logsumexp, mesh, placements),
    )


def cpu_attention_backward(op, args, kwargs):
    """Returns the gradients of `cpu_attention`."""
    mesh = _mesh_of(args, kwargs)
    placements = _attention_placements(args[1:4], mesh)
    tensors = [_local(t, mesh, placements) for t in args[:6]]
    kwargs = dict(kwargs)
    if kwargs.get("attn_mask") is not None:
        kwargs["attn_mask"] = _local_mask(
            kwargs["attn_mask"], args[1].ndim, mesh, placements
        )
    results = op(*tensors, *args[6:], **kwargs)
    return tuple(_wrap(result, mesh, placements) for result in results)


def _attention_placements(tensors, mesh):
    """Returns the split over batch and heads that query, key, value share."""
    kept = []
    counts = {0: 1, 1: 1}
    for dim, of_query in enumerate(_placements(tensors[0], mesh)):
        split = of_query.is_shard() and of_query.dim in counts
        if split:
            counts[of_query.dim] *= mesh.size(dim)
            split = all(
                t.shape[of_query.dim] % counts[of_query.dim] == 0
                for t in tensors
            )
        kept.append(of_query if split else Replicate())
    return kept


def _local_mask(mask, ndim, mesh, placements):
    """Returns this process's part of a mask, which may broadcast."""
    missing = ndim - mask.ndim
    placements = [
        Shard(p.dim - missing)
        if p.is_shard() and p.dim >= missing and mask.shape[p.dim - missing] > 1
        else Replicate()
        for p in placements
    ]
    return _local(mask, mesh, placements)


def random_in_place(op, args, kwargs):
    """Fills a DTensor with its part of the numbers that one process draws."""
    tensor = args[0]
    _refuse_partial(op, tensor)
    whole = torch.empty_strided(
        tensor.shape,
        tensor.stride(),
        dtype=tensor.dtype,
        device=tensor._local_tensor.device,
    )
    args, kwargs = pytree.tree_map_only(
        DTensor, placement.to_full, (args[1:], kwargs)
    )
    op(whole, *args, **kwargs)
    tensor._local_tensor.copy_(
        _local(whole, tensor.device_mesh, tensor.placements)
    )
    return tensor


def random_like(op, args, kwargs):
    """Draws as one process does; the result is split as the argument is."""
    like = args[0]
    _refuse_partial(op, like)
    mesh = like.device_mesh
    whole = torch.empty_strided(
        like.shape,
        like.stride(),
        dtype=like.dtype,
        device=like._local_tensor.device,
    )
    if op is aten.bernoulli.default or op is aten.bernoulli.p:
        # The argument holds probabilities.
        whole = placement.to_full(like)
    return _wrap(
        _local(op(whole, *args[1:], **kwargs), mesh, like.placements),
        mesh,
        like.placements,
    )


def native_dropout(op, args, kwargs):
    """Drops what one process drops."""
    x, rate, train = args
    _refuse_partial(op, x)
    mesh = x.device_mesh
    ones = torch.empty_strided(
        x.shape, x.stride(), dtype=x.dtype, device=x._local_tensor.device
    ).fill_(1)
    scale, mask = (
        _local(whole, mesh, x.placements) for whole in op(ones, rate, train)
    )
    return (
        _wrap(x._local_tensor * scale, mesh, x.placements),
        _wrap(mask, mesh, x.placements),
    )


def embedding(original):
    """Wraps `torch.nn.functional.embedding` with one for split tables.

    A table split over its rows looks up what it holds, and the parts are added
    up; one split over its columns makes its part of each row.
    """

    @functools.wraps(original)
    def lookup(
        input,
        weight,
        padding_idx=None,
        max_norm=None,
        norm_type=2.0,
        scale_grad_by_freq=False,
        sparse=False,
    ):
        tensors = (input, weight)
        if not any(isinstance(t, DTensor) for t in tensors):
            return original(
                input,
                weight,
                padding_idx,
                max_norm,
                norm_type,
                scale_grad_by_freq,
                sparse,
            )
        if padding_idx is not None or max_norm is not None:
            raise NotImplementedError(
                "A distributed embedding has no `padding_idx` and no "
                f"`max_norm`. Received: padding_idx={padding_idx}, "
                f"max_norm={max_norm}"
            )
        if scale_grad_by_freq or sparse:
            raise NotImplementedError(
                "A distributed embedding has dense gradients only. Received: "
                f"scale_grad_by_freq={scale_grad_by_freq}, sparse={sparse}"
            )
        return _embedding(original, input, weight)

    return lookup


def _embedding(original, ids, table):
    mesh = _mesh_of((ids, table), {})
    ids_placed, gradient_placed, result_placed = [], [], []
    table_placed = []
    first, rows = 0, table.shape[0]
    split_rows = False
    of_ids = _placements(ids, mesh)
    for dim, of_table in enumerate(_placements(table, mesh)):
        ids_one, result_one, gradient_one = (Replicate(),) * 3
        if of_table == Shard(0):
            split_rows = True
            rows = -(-rows // mesh.size(dim))
            first += rows * mesh.get_local_rank(dim)
            result_one, gradient_one = Partial(), of_table
        elif of_table.is_shard():
            result_one, gradient_one = Shard(ids.ndim), of_table
        elif of_ids[dim].is_shard():
            ids_one = result_one = of_ids[dim]
            gradient_one = Partial()
        ids_placed.append(ids_one)
        result_placed.append(result_one)
        gradient_placed.append(gradient_one)
        table_placed.append(of_table if of_table.is_shard() else Replicate())
    local_ids = _local(ids, mesh, ids_placed)
    if not isinstance(table, DTensor):
        table = placement.replicate(table, mesh)
    local_table = table.redistribute(placements=table_placed).to_local(
        grad_placements=gradient_placed
    )
    if split_rows:
        local_ids = local_ids - first
        held = (local_ids >= 0) & (local_ids < local_table.shape[0])
        result = original(torch.where(held, local_ids, 0), local_table)
        result = torch.where(held.unsqueeze(-1), result, 0)
    else:
        result = original(local_ids, local_table)
    result = DTensor.from_local(result, mesh, result_placed, run_check=False)
    if split_rows:
        result = result.redistribute(
            placements=[
                Replicate() if p.is_partial() else p for p in result_placed
            ]
        )
    return result


_HANDLERS = {
    aten.convolution.default: convolution,
    aten.convolution_backward.default: convolution_backward,
    aten._scaled_dot_product_flash_attention_for_cpu.default: cpu_attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default: (
        cpu_attention_backward
    ),
    aten.bernoulli_.float: random_in_place,
    aten.bernoulli_.Tensor: random_in_place,
    aten.normal_.default: random_in_place,
    aten.uniform_.default: random_in_place,
    aten.exponential_.default: random_in_place,
    aten.random_.default: random_in_place,
    aten.random_.to: random_in_place,
    getattr(aten.random_, "from"): random_in_place,
    aten.bernoulli.default: random_like,
    aten.bernoulli.p: random_like,
    aten.rand_like.default: random_like,
    aten.randn_like.default: random_like,
    aten.randint_like.default: random_like,
    aten.randint_like.low_dtype: random_like,
    aten.native_dropout.default: native_dropout,
    aten.cauchy_.default: random_in_place,
    aten.geometric_.default: random_in_place,
    aten.log_normal_.default: random_in_place,
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
    aten.unbind.int: along_dim,
}


def _mesh_of(args, kwargs):
    for leaf in pytree.tree_leaves((args, kwargs)):
        if isinstance(leaf, DTensor):
            return leaf.device_mesh
    raise TypeError(f"No DTensor among the arguments. Received: args={args}")


def _placements(tensor, mesh):
    if isinstance(tensor, DTensor):
        return tensor.placements
    return (Replicate(),) * mesh.ndim


def _local(tensor, mesh, placements):
    """Returns this process's part of a tensor, moved to the placements."""
    if isinstance(tensor, DTensor):
        if tuple(tensor.placements) != tuple(placements):
            tensor = tensor.redistribute(placements=placements)
        return tensor._local_tensor
    shape, offset = compute_local_shape_and_global_offset(
        tensor.shape, mesh, placements
    )
    for dim, (size, start) in enumerate(zip(shape, offset)):
        if size != tensor.shape[dim]:
            tensor = tensor.narrow(dim, min(start, tensor.shape[dim]), size)
    return tensor


def _wrap(local, mesh, placements):
    """Returns a DTensor of evenly split parts, below the gradient."""
    if any(placed.is_partial() for placed in placements):
        # What comes out of an all-reduce is contiguous, and so has to be what
        # is noted about its strides.
        local = local.contiguous()
    shape, stride = compute_global_tensor_info(local, mesh, placements)
    meta = TensorMeta(torch.Size(shape), tuple(stride), local.dtype)
    spec = DTensorSpec(mesh, tuple(placements), tensor_meta=meta)
    return DTensor(local, spec, requires_grad=False)


def _settled(local, mesh, placements):
    """Returns the DTensor of a result whose partial sums are added up."""
    result = _wrap(local, mesh, placements)
    whole = [Replicate() if p.is_partial() else p for p in placements]
    return result.redistribute(placements=whole)


def _refuse_partial(op, tensor):
    if any(p.is_partial() for p in tensor.placements):
        raise NotImplementedError(
            f"{op} cannot draw numbers for a tensor whose parts are not added "
            f"up yet. Received: placements={tensor.placements}"
        )
