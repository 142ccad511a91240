"""The rows of a plan: variables, sums over the devices, and gathers."""

import collections
import math

from keras_tp.distribution.planning import cost
from keras_tp.distribution.tensor_layout import TensorLayout
from keras_tp.distribution.tensor_layout import layout_with

# In the reason of a row.
NOT_PREDICTED = "which the plan does not predict"
# An obstacle: such variables are whole.
OF_ONE_PATH = "several variables of different shapes have this path"


class PlannedVariable(
    collections.namedtuple(
        "PlannedVariable",
        "path shape dtype trainable axes blocks why obstacles "
        "sequence_parallel gathered_again",
        defaults=[False, False],
    )
):
    """One row of a `ShardingPlan`.

    Args:
        path: String.
        shape: Tuple of ints.
        dtype: String.
        trainable: Boolean.
        axes: Tuple with `None`, a mesh axis or a tuple of mesh axes for each
            dim: the logical layout.
        blocks: Int. If more than 1, the dim that the model axis splits consists
            of this many blocks, and each device holds a part of each block.
        why: String, the reason for the layout.
        obstacles: Tuple with a string for each dim: why the planner cannot
            split it, or an empty string.
        sequence_parallel: Boolean. Whether activations around it are split
            along the sequence. Defaults to `False`.
        gathered_again: Boolean. Whether it is fully sharded, and the backward
            pass gathers it again. Defaults to `False`.
    """

    def layout(self, device_mesh, axis):
        """Returns the `TensorLayout`; `axis` is the one with the blocks."""
        blocks = {
            dim: self.blocks for dim, a in enumerate(self.axes) if a == axis
        }
        layout = layout_with(self.axes, device_mesh, True, blocks)
        layout.sequence_parallel = self.sequence_parallel
        return layout

    @property
    def nbytes(self):
        """Size of the whole variable in bytes."""
        return math.prod(self.shape) * cost.item_bytes(self.dtype)

    @property
    def is_split(self):
        return any(self.axes)

    def is_of_several(self):
        """Returns whether variables of different shapes have this path."""
        return OF_ONE_PATH in self.obstacles

    @property
    def is_predicted(self):
        """Whether the plan has all the collectives that the layout causes."""
        return NOT_PREDICTED not in self.why


class PlannedReduction(
    collections.namedtuple(
        "PlannedReduction",
        "path operation backward terms size scattered",
        defaults=[False],
    )
):
    """A sum over the devices in every training step.

    Args:
        path: String, path of the layer that causes it.
        operation: String, name of the operation.
        backward: Boolean. Whether a gradient is summed. A forward pass alone
            has no such sum.
        terms: Int, number of gradients that are added up before the sum over
            the devices. XLA on CPUs sums each of them over the devices.
        size: `Size` in bytes.
        scattered: Boolean. Whether each device keeps the sum of its part of
            the sequence: a reduce-scatter. The other pass has an all-gather.
            Defaults to `False`.
    """


class PlannedGather(
    collections.namedtuple("PlannedGather", "path axes is_scattered size")
):
    """The output of a layer that is gathered in every forward pass.

    Args:
        path: String, path of the layer.
        axes: Tuple with `None` or the mesh axis that splits the output before,
            for each dim. All are `None` if it consists of split blocks. The
            first dim is the batch, unless the output is made of variables
            alone, as an embedding of positions.
        is_scattered: Boolean. Whether its gradient is a sum over the devices.
            Each needs a part of the sum: a reduce-scatter in a training step.
        size: `Size` in bytes of the whole output.
    """

    def layout(self, device_mesh, batch_axis):
        """Returns a `TensorLayout`: all dims are whole except for the batch."""
        is_batch = self.size.batch and not self.size.added
        first = batch_axis if is_batch else None
        axes = (first, *[None] * (len(self.axes) - 1))
        layout = TensorLayout(axes, device_mesh)
        if any(self.axes):
            before = (first, *self.axes[1:])
            layout.gathered_from = TensorLayout(before, device_mesh)
            layout.is_scattered = self.is_scattered
        return layout
