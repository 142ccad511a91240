"""Rematerialization that repeats no collective."""

import functools

import torch
from torch.utils import checkpoint


def _policy(context, operation, *args, **kwargs):
    """Saves the results of collectives, and nothing else."""
    if operation.namespace == "_c10d_functional":
        return checkpoint.CheckpointPolicy.MUST_SAVE
    return checkpoint.CheckpointPolicy.PREFER_RECOMPUTE


_contexts = functools.partial(
    checkpoint.create_selective_checkpoint_contexts, _policy
)


def keeping(f, plain):
    """See `backend.rematerialization.row`."""

    def remat(*args, **kwargs):
        if torch.compiler.is_compiling():
            return plain(*args, **kwargs)
        return checkpoint.checkpoint(
            f, *args, use_reentrant=False, context_fn=_contexts, **kwargs
        )

    return remat
