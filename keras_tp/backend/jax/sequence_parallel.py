"""Products between activations that are split along the sequence.

GSPMD alone gathers kernels where an activation is split along the sequence. So
these products are written for the shards of each device, with `shard_map`: an
all-gather in front of a column-parallel kernel, and a reduce-scatter behind a
row-parallel one. The gradient of each is the other.

The gathered tensor is handed on with a dim of devices in front, because each
device has a copy of its own. The gradients of all its products, such as those
of queries, keys and values, are therefore added up on each device before one
reduce-scatter.
"""

import collections

import jax
import jax.numpy as jnp
from jax._src import core as jax_core
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec
from keras.src.backend.common.stateless_scope import get_stateless_scope
from keras.src.backend.common.stateless_scope import in_stateless_scope
from keras.src.backend.jax import core
from keras.src.distribution.distribution_lib import distribution

from keras_tp.backend.fully_sharded import as_it_is
from keras_tp.backend.jax import in_shard_map
from keras_tp.backend.jax import rematerialization
from keras_tp.backend.jax import shared_inputs
from keras_tp.backend.jax import storage
from keras_tp.backend.sequence_parallel import SEQUENCE
from keras_tp.backend.sequence_parallel import axis_of
from keras_tp.backend.sequence_parallel import is_used


class Kernel(collections.namedtuple("Kernel", "tensor axes layout size")):
    """A kernel, or its transpose, whose product has split activations.

    Args:
        tensor: Tensor, as it is stored.
        axes: Tuple with a mesh axis or `None` for each of its dims.
        layout: `TensorLayout` of the variable.
        size: Int, the size of the split dim without padding; `None` if it has
            none.
    """

    @property
    def dim(self):
        """The dim that is split over the model axis."""
        axis = axis_of(self.layout, (0, 0, 0))
        return self.axes.index(axis) if axis in self.axes else None

    def beside(self, batch):
        """Returns the kernel for a batch that this mesh axis splits.

        Without such an axis, XLA gathers the kernel before the product, because
        every device has the whole batch, and so the same result.

        Args:
            batch: String, or `None`.
        """
        if batch is not None:
            return self
        kept = [a if d == self.dim else None for d, a in enumerate(self.axes)]
        return self._replace(axes=tuple(kept))

    def over_batch(self, part):
        """Gathers a part of the tensor over all axes but the model axis.

        The gradient is reduce-scattered over them.
        """
        for dim, axis in enumerate(self.axes):
            if axis is not None and dim != self.dim:
                part = in_shard_map.all_gather(part, axis, dim)
        return part

    def mapped(self, function, in_specs, out_specs):
        """Wraps a function of the shards of an activation and the kernel.

        If the function gathers the kernel, the backward pass does so again.
        """
        mesh = self.layout.device_mesh.backend_mesh
        found = jax.shard_map(
            function, mesh=mesh, in_specs=in_specs, out_specs=out_specs
        )
        is_whole = all(
            axis is None or dim == self.dim
            for dim, axis in enumerate(self.axes)
        )
        return found if is_whole else jax.checkpoint(found)


def kernel_of(operand):
    """Returns the `Kernel` of a variable or its transpose, or `None`."""
    if not in_stateless_scope():
        return None
    if not isinstance(operand, core.Variable):
        noted, kernel = _notes().get(("transposed", id(operand)), (None, None))
        return kernel if noted is operand else None
    layout = operand._layout
    # Layouts of Keras have no such attribute.
    if not getattr(layout, "sequence_parallel", False):
        return None
    with storage.stored(), as_it_is():
        tensor = core.convert_to_tensor(operand)
    kernel = Kernel(tensor, layout.stored_axes, layout, None)
    is_padded = tensor.ndim == len(operand.shape) and kernel.dim is not None
    if is_padded and tensor.shape != tuple(operand.shape):
        kernel = kernel._replace(size=operand.shape[kernel.dim])
    return kernel


def whole_before(x, operand):
    """Keeps the input of a kernel whole along the sequence if the plan does.

    Such an input is added to split activations later, as in the first block of
    a model without an embedding. XLA would split it too, and so the attention,
    whose kernels on GPUs cannot be split along the sequence.

    Args:
        x: Tensor.
        operand: The kernel, as a `keras.Variable`, or another operand.

    Returns:
        Tensor, `x` or its copy with a constraint.
    """
    layout = getattr(operand, "_layout", None)
    if (
        not isinstance(operand, core.Variable)
        or not isinstance(x, jax.core.Tracer)
        or x.ndim != 3
        or getattr(layout, "sequence_parallel", True)
        or not any(layout.axes)
        or not is_used()
    ):
        return x
    other = PartitionSpec.UNCONSTRAINED
    mesh = layout.device_mesh.backend_mesh
    spec = PartitionSpec(other, None, other)
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))


def note_transpose(result, operand, axes):
    """Remembers that a tensor is the transpose of a kernel of two dims."""
    kernel = kernel_of(operand)
    if kernel is not None and kernel.tensor.ndim == 2 and axes is None:
        swapped = kernel._replace(
            tensor=jnp.transpose(kernel.tensor), axes=kernel.axes[::-1]
        )
        _notes()["transposed", id(result)] = result, swapped


def product(subscripts, x, kernel, multiply):
    """Returns a product between split activations.

    Args:
        subscripts: String of `einsum`: the dims of both operands and of the
            result, each a letter.
        x: Tensor.
        kernel: `Kernel`, or `None`.
        multiply: Function of `x` and the kernel's tensor.

    Returns:
        Tensor, or `None` if the product is not of this kind.
    """
    if kernel is None or not isinstance(x, jax.core.Tracer):
        return None
    operands, out = subscripts.split("->")
    left, right = operands.split(",")
    if not (left + right + out).isalpha() or kernel.dim is None:
        return None
    if len(left) != x.ndim or len(right) != len(kernel.axes):
        return None
    split = right[kernel.dim]
    if split in out and split not in left:
        return _column(x, kernel, multiply, (left, right, out), split)
    if split in left and split not in out:
        return _row(x, kernel, multiply, (left, right, out), split)
    return None


def matmul(original, x1, x2):
    """Returns a product of matrices; `original` is Keras's function."""
    kernel, result = kernel_of(x2), None
    if kernel is not None:
        x1 = core.convert_to_tensor(x1)
        if x1.ndim == 3:
            result = product("abd,de->abe", x1, kernel, original)
    if result is None:
        x1 = shared_inputs.copied(whole_before(x1, x2), x2)
        result = storage.product(lambda kernel: original(x1, kernel), x2)
    return result


def _column(x, kernel, multiply, dims, split):
    left, right, out = dims
    axis = axis_of(kernel.layout, x.shape)
    if axis is None or not set(left[: SEQUENCE + 1]) <= set(out):
        return None
    mesh = kernel.layout.device_mesh.backend_mesh
    batch = _batch_axis(mesh, x.shape[0], axis)
    kernel = kernel.beside(batch)
    result = kernel.mapped(
        lambda whole, w: multiply(whole[0], kernel.over_batch(w)),
        (PartitionSpec(axis, batch), PartitionSpec(*kernel.axes)),
        _spec(out, {split: axis, left[0]: batch}),
    )(_gathered(x, axis, mesh, batch), kernel.tensor)
    if kernel.size is not None:
        dim = out.index(split)
        result = jax.lax.slice_in_dim(result, 0, kernel.size, axis=dim)
    return result


def _row(x, kernel, multiply, dims, split):
    left, right, out = dims
    if len(out) != 3 or left[:2] != out[:2]:
        return None
    axis = axis_of(kernel.layout, (*x.shape[:2], None))
    if axis is None or kernel.size is not None:
        return None
    mesh = kernel.layout.device_mesh.backend_mesh
    batch = _batch_axis(mesh, x.shape[0], axis)
    kernel = kernel.beside(batch)
    return kernel.mapped(
        lambda part, w: in_shard_map.reduce_scatter(
            multiply(part, kernel.over_batch(w)), axis, SEQUENCE
        ),
        (
            _spec(left, {split: axis, left[0]: batch}),
            PartitionSpec(*kernel.axes),
        ),
        PartitionSpec(batch, axis),
    )(x, kernel.tensor)


def lookup(table, indices):
    """Returns rows of a split table, split along the sequence.

    Args:
        table: `Kernel`, or `None`.
        indices: Tensor of ints, of shape `(batch, sequence)`.

    Returns:
        Tensor, or `None` if the lookup is not of this kind.
    """
    if table is None or table.dim != 0 or table.tensor.ndim != 2:
        return None
    if not isinstance(indices, jax.core.Tracer) or indices.ndim != 2:
        return None
    if not jnp.issubdtype(table.tensor.dtype, jnp.floating):
        return None
    axis = axis_of(table.layout, (*indices.shape, None))
    if axis is None:
        return None
    mesh = table.layout.device_mesh.backend_mesh
    batch = _batch_axis(mesh, indices.shape[0], axis)
    table = table.beside(batch)
    count = table.size or table.tensor.shape[0]
    # As in `jnp.take`, here and below.
    indices = jnp.where(indices < 0, indices + count, indices)

    def look_up(rows, indices):
        rows = table.over_batch(rows)
        own = indices - jax.lax.axis_index(axis) * rows.shape[0]
        found = jnp.take(rows, own, axis=0, mode="clip")
        is_own = (own >= 0) & (own < rows.shape[0])
        return in_shard_map.reduce_scatter(
            jnp.where(is_own[..., None], found, 0), axis, SEQUENCE
        )

    found = jax.shard_map(
        look_up,
        mesh=mesh,
        in_specs=(PartitionSpec(*table.axes), PartitionSpec(batch)),
        out_specs=PartitionSpec(batch, axis),
    )(table.tensor, indices)
    exists = (indices >= 0) & (indices < count)
    return jnp.where(exists[..., None], found, jnp.nan)


def _gathered(x, axis, mesh, batch):
    """Returns the whole of an activation for each device, in a dim in front.

    A tensor that several products read is gathered once.
    """
    # A function that is traced on its own, as for rematerialization, must not
    # take a tensor from another one.
    state = jax_core.get_opaque_trace_state(convention="flax")
    key = "gathered", id(x)
    noted, made_in, gathered = _notes().get(key, (None, None, None))
    if noted is x and made_in == state:
        return gathered
    gathered = jax.shard_map(
        lambda part: in_shard_map.all_gather(part, axis, SEQUENCE)[None],
        mesh=mesh,
        in_specs=PartitionSpec(batch, axis),
        out_specs=PartitionSpec(axis, batch),
    )(x)
    _notes()[key] = x, state, gathered
    return gathered


def _spec(letters, axes):
    return PartitionSpec(*(axes.get(letter) for letter in letters))


def _batch_axis(mesh, size, axis):
    """Returns the mesh axis that splits a batch of this size, or `None`.

    It is another one than `axis`, which splits the sequence.
    """
    name = getattr(distribution(), "batch_dim_name", None)
    # The size of a batch may be a symbol, as in `export`.
    if name in (None, axis) or not isinstance(size, int):
        return None
    return None if size % mesh.shape[name] else name


def _notes():
    """Returns what is remembered while a step is traced, by id of a tensor."""
    return vars(get_stateless_scope()).setdefault("_sequence_parallel", {})


class Functions:
    """Functions of `keras.src.backend.jax.numpy`; `blocks` has `matmul`."""

    def einsum(original, subscripts, *operands, **kwargs):
        if len(operands) != 2 or "->" not in subscripts:
            return original(subscripts, *operands, **kwargs)
        subscripts = subscripts.replace(" ", "")
        x, kernel = operands

        def multiply(x, kernel):
            return original(subscripts, x, kernel, **kwargs)

        result = product(subscripts, x, kernel_of(kernel), multiply)
        if result is None:
            x = shared_inputs.copied(whole_before(x, kernel), kernel)
            result = storage.product(lambda w: multiply(x, w), kernel)
        inputs, output = subscripts.split("->")
        of_kernel = inputs.split(",")[1]
        if len(of_kernel) != len(kernel.shape):
            # An ellipsis.
            return result
        dims = [i for i, dim in enumerate(of_kernel) if dim not in output]
        return rematerialization.summed(result, kernel, *dims)

    def take(original, x, indices, axis=None):
        found = None
        if axis == 0:
            found = lookup(kernel_of(x), core.convert_to_tensor(indices))
        if found is None:
            found = original(x, indices, axis=axis)
        return (
            found if axis is None else rematerialization.summed(found, x, axis)
        )

    def transpose(original, x, axes=None):
        result = original(x, axes=axes)
        note_transpose(result, x, axes)
        if axes is None and isinstance(x, core.Variable):
            storage.note_transpose(result, x)
        return result
