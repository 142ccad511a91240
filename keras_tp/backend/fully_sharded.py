"""Fully sharded variables: which mesh axis they are gathered over."""

from keras.src.distribution.distribution_lib import distribution

# The names of axes that split batches and nothing else.
_BATCH_AXES = ("batch", "data")


def batch_axis(is_alone):
    """Returns the mesh axis of the batch, if variables are gathered over it.

    Keras takes the first axis of a mesh for it, whatever its name, unless it is
    told another one. On a mesh of one axis, `"model"`, that is the axis of
    tensor parallelism.

    Args:
        is_alone: Boolean. Whether no other axis splits the variable, or the
            mesh has no other.

    Returns:
        String, or `None`.
    """
    axis = getattr(distribution(), "batch_dim_name", None)
    return None if is_alone and axis not in _BATCH_AXES else axis
