"""Rematerialization that repeats no collective."""

import functools

import torch
from keras.src.backend.common.keras_tensor import any_symbolic_tensors
from keras.src.distribution.distribution_lib import distribution
from torch.utils import checkpoint

from keras_tp.backend.hooks import around


def _keep_collectives(context, operation, *args, **kwargs):
    """Keeps what a collective has returned; all else is computed again."""
    if operation.namespace == "_c10d_functional":
        return checkpoint.CheckpointPolicy.MUST_SAVE
    return checkpoint.CheckpointPolicy.PREFER_RECOMPUTE


@around
def hook_remat(original, f):
    """Keeps the results of collectives, in a run with a distribution."""
    again = original(f)
    contexts = functools.partial(
        checkpoint.create_selective_checkpoint_contexts, _keep_collectives
    )

    @functools.wraps(again)
    def remat(*args, **kwargs):
        if any_symbolic_tensors(args, kwargs):
            # A plan is made from the operations inside.
            return f(*args, **kwargs)
        if distribution() is None or torch.compiler.is_compiling():
            return again(*args, **kwargs)
        return checkpoint.checkpoint(
            f, *args, use_reentrant=False, context_fn=contexts, **kwargs
        )

    return remat
