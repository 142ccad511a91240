"""KV heads that are repeated for the query heads."""

from keras.src.distribution.distribution_lib import distribution


def only_repeated_divide(size, repeats):
    """Returns whether an axis of the mesh divides heads once they are repeated.

    Args:
        size: Int, number of KV heads.
        repeats: Int, how often each is repeated.
    """
    mesh = getattr(distribution(), "device_mesh", None)
    return mesh is not None and any(
        size % count and size * repeats % count == 0 for count in mesh.shape
    )
