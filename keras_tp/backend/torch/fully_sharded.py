"""Kernels that are split over the axis of the batch too: FSDP, or ZeRO-3.

A product gathers such a kernel over this axis, and gathers it again for its
gradients, which are reduce-scattered (Rajbhandari et al. 2020). DTensor alone
may gather the batch instead.
"""

from torch.distributed.tensor import Replicate

from keras_tp.backend.fully_sharded import batch_axis
from keras_tp.backend.torch import placement


def is_of_batch(mesh, dim):
    """Returns whether a mesh dim splits batches, and so gathers variables."""
    # A mesh of the user's own may have no names.
    names = mesh.mesh_dim_names
    return names is not None and names[dim] == batch_axis(mesh.ndim == 1)


def gathered_placements(kernel):
    """Returns the placements of a kernel that is whole over the batch axis.

    Args:
        kernel: DTensor.

    Returns:
        Tuple of placements, or `None` if it is not fully sharded.
    """
    mesh, placements = kernel.device_mesh, list(kernel.placements)
    if any(isinstance(placed, placement.InBlocks) for placed in placements):
        return None
    for dim, placed in enumerate(placements):
        if placed.is_shard() and is_of_batch(mesh, dim):
            placements[dim] = Replicate()
            return tuple(placements)
    return None
