"""Fully sharded variables: which mesh axis they are gathered over."""

import contextlib
import threading

from keras.src.distribution.distribution_lib import distribution

# The names of axes that split batches and nothing else.
_BATCH_AXES = ("batch", "data")


class _State(threading.local):
    # Whether values stay as they are.
    off = False


_state = _State()


@contextlib.contextmanager
def as_it_is():
    """Context in which values are not gathered, as for an optimizer."""
    before, _state.off = _state.off, True
    try:
        yield
    finally:
        _state.off = before


def batch_axis(is_alone):
    """Returns the mesh axis of the batch, if variables are gathered over it.

    Keras takes the first axis of a mesh for it, whatever its name, unless it is
    told another one. On a mesh of one axis, `"model"`, that is the axis of
    tensor parallelism.

    Args:
        is_alone: Boolean. Whether no other axis splits the variable, or the
            mesh has no other.

    Returns:
        String, or `None`: there is none, or values stay as they are.
    """
    if _state.off:
        return None
    axis = getattr(distribution(), "batch_dim_name", None)
    return None if is_alone and axis not in _BATCH_AXES else axis
