"""Sequence parallelism: where activations are split along the sequence.

Between a row-parallel and a column-parallel layer, tensor parallelism alone
keeps activations of shape `(batch, sequence, features)` whole on each device.
Sequence parallelism splits them along the sequence (Korthikanti et al. 2022,
arXiv 2205.05198, section 4.2.2). A column-parallel layer gathers its input, and
the sum over the devices after a row-parallel layer is reduce-scattered. The
bytes sent are those of the all-reduces that these replace.

A layout says which kernels are between split activations: see
`TensorLayout.sequence_parallel`. Each backend has the two operations.
"""

import warnings

from keras.src.distribution.distribution_lib import distribution

SEQUENCE = 1
_RANK = 3
# Pairs of a size that was not split and the number of devices.
_warned = set()


def axis_of(layout, shape):
    """Returns the mesh axis that splits the sequence of an activation.

    Warns, once for each size, if the devices do not divide the sequence.

    Args:
        layout: The layout of a kernel, of Keras or keras_tp, or `None`.
        shape: Tuple of ints, the shape of an input or output of its layer.

    Returns:
        String, or `None` if the activation is not split along the sequence.
    """
    # Layouts of Keras have no such attribute.
    if not getattr(layout, "sequence_parallel", False) or len(shape) != _RANK:
        return None
    names = [name for name in layout.axes if isinstance(name, str)]
    if len(names) > 1:
        # A fully sharded variable is split over the axis of the batch too.
        batch = getattr(distribution(), "batch_dim_name", None)
        names = [name for name in names if name != batch]
    if len(names) != 1:
        return None
    mesh = layout.device_mesh
    count = dict(zip(mesh.axis_names, mesh.shape))[names[0]]
    size = shape[SEQUENCE]
    if not isinstance(size, int) or size % count or count == 1:
        _warn(size, count)
        return None
    return names[0]


def is_used():
    """Returns whether the distribution splits any activation like this."""
    found = distribution()
    if getattr(found, "_options", {}).get("sequence_parallel", False):
        return True
    layouts = getattr(found, "_layout_map", {}).values()
    # Layouts of Keras have no such attribute.
    return any(
        getattr(layout, "sequence_parallel", False) for layout in layouts
    )


def _warn(size, count):
    # A cache is filled one position at a time.
    is_small = not isinstance(size, int) or size < count or count == 1
    if is_small or (size, count) in _warned:
        return
    _warned.add((size, count))
    warnings.warn(
        f"A sequence of {size} positions does not divide by {count} devices: "
        "its activations are whole on each device. Results are correct, but "
        "sequence parallelism saves no memory. Pad sequences to a multiple of "
        f"{count}. Received: sequence={size}, devices={count}",
        stacklevel=3,
    )
