"""Variables that are split over the axis of the batch too: FSDP, or ZeRO-3.

A traced step gathers them over this axis where a layer reads them, and splits
their gradients (Rajbhandari et al. 2020). DTensor alone may split activations
along another dim than the batch instead, or fails.
"""

import tensorflow as tf
from tensorflow.experimental import dtensor

from keras_tp.backend.fully_sharded import batch_axis


def gathered_layout(layout):
    """Returns a DTensor layout that is whole over the axis of the batch.

    `None` if it is so already, or outside of traced functions.
    """
    specs = layout.sharding_specs
    axis = batch_axis(sum(name != dtensor.UNSHARDED for name in specs) == 1)
    if tf.executing_eagerly() or axis not in specs:
        return None
    rest = [dtensor.UNSHARDED if name == axis else name for name in specs]
    return dtensor.Layout(rest, layout.mesh)
