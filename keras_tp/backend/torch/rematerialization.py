"""Rematerialization that repeats no collective."""

import functools

import torch
from keras.src.backend.common import global_state
from torch.utils import checkpoint

from keras_tp.backend import rematerialization

_SCOPES = "name_scope_stack"


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
        passes = []
        result = checkpoint.checkpoint(
            _in_same_scopes(_alike(f, passes)),
            *args,
            use_reentrant=False,
            context_fn=_contexts,
            # It stops by an error, which Keras's tracebacks catch. They hold
            # what was computed again until Python collects garbage.
            early_stop=False,
            **kwargs,
        )
        (first,) = passes
        rematerialization.apply(f, first, first.values, first.losses)
        return result

    return remat


def _alike(f, passes):
    """Wraps a function: each call after the first one computes the same."""
    before = []

    @functools.wraps(f)
    def run(*args, **kwargs):
        with rematerialization.Pass(before) as noted:
            result = f(*args, **kwargs)
        if not passes:
            passes.append(noted)
            before.extend((v, v.value.clone()) for v in noted.changed)
        return result

    return run


def _in_same_scopes(f):
    """Wraps a function to run in the name scopes that are open now.

    They tell which layer an operation belongs to. The backward pass runs the
    function outside of its layer's call.
    """
    scopes = tuple(global_state.get_global_attribute(_SCOPES) or ())

    @functools.wraps(f)
    def run(*args, **kwargs):
        before = global_state.get_global_attribute(_SCOPES)
        global_state.set_global_attribute(_SCOPES, list(scopes))
        try:
            return f(*args, **kwargs)
        finally:
            global_state.set_global_attribute(_SCOPES, before)

    return run
