"""Products with kernels of several blocks, such as queries, keys and values.

A kernel of shape (D, 3 E) whose blocks are split is stored as (D, 3, E), split
along the last dim. A product with it of shape (..., 3 E) cannot be split by XLA
in this way, but the one of shape (..., 3, E) is. So that one is computed and
remembered beside the other, until a split takes its blocks. XLA finds by itself
that a reshape to (..., 3, heads, E / heads) begins with it. The tensor of shape
(..., 3 E) is then not computed; if it is needed elsewhere, XLA gathers it.
"""

import functools

import jax.numpy as jnp
import numpy as np
from keras.src.backend.jax import core
from keras.src.backend.jax.numpy import einsum
from keras.src.backend.jax.sparse import jax_sparse

from keras_tp.backend.jax import rematerialization
from keras_tp.backend.jax import sequence_parallel
from keras_tp.backend.jax import storage


def _form(x):
    """Returns a tensor in blocks and their dim, or two times `None`."""
    if isinstance(x, core.Variable):
        # Not `value`, which would be gathered outside of compiled programs.
        dim = storage.block_dim(x)
        if dim is None:
            return None, None
        with storage.stored():
            return core.convert_to_tensor(x), dim
    return storage.noted(x)


def _joined(in_blocks, dim):
    shape = in_blocks.shape
    joined = (*shape[:dim], shape[dim] * shape[dim + 1], *shape[dim + 2 :])
    tensor = jnp.reshape(in_blocks, joined)
    storage.note(tensor, in_blocks, dim)
    return tensor


class Functions:
    """Functions of `keras.src.backend.jax.numpy`."""

    def matmul(original, x1, x2):
        kernel, dim = _form(x2)
        if dim != 1 or kernel.ndim != 3:
            result = sequence_parallel.matmul(original, x1, x2)
            rank = len(getattr(x2, "shape", ()))
            return rematerialization.summed(result, x2, max(rank - 2, 0))
        x1 = core.convert_to_tensor(x1)
        if x1.ndim < 1 or isinstance(x1, jax_sparse.JAXSparse):
            return original(x1, x2)
        multiply = functools.partial(einsum, "...d,dbe->...be")
        in_blocks = sequence_parallel.product(
            "abd,dce->abce", x1, sequence_parallel.kernel_of(x2), multiply
        )
        if in_blocks is None:
            x1 = sequence_parallel.whole_before(x1, x2)
            in_blocks = multiply(x1, kernel)
        return _joined(in_blocks, x1.ndim - 1)

    def add(original, x1, x2):
        (a, i), (b, j) = _form(x1), _form(x2)
        if a is None or b is None or a.ndim - i != b.ndim - j:
            return original(x1, x2)
        return _joined(original(a, b), max(i, j))

    def split(original, x, indices_or_sections, axis=0):
        in_blocks, dim = _form(x)
        if dim is None or axis % (in_blocks.ndim - 1) != dim:
            return original(x, indices_or_sections, axis=axis)
        count, size = in_blocks.shape[dim : dim + 2]
        if np.array_equal(indices_or_sections, count) or np.array_equal(
            indices_or_sections, np.arange(1, count) * size
        ):
            parts = jnp.split(in_blocks, count, axis=dim)
            return [jnp.squeeze(part, dim) for part in parts]
        return original(x, indices_or_sections, axis=axis)
