"""What a plan says of a split: why it was chosen, and what it costs."""

from keras_tp.distribution.planning.plan_rows import NOT_PREDICTED

ROW = "row-parallel"
COLUMN = "column-parallel: one all-reduce of the input's gradient"
# Of heads that are reshaped to (KV heads, groups), fewer KV heads than devices.
SHARED_HEADS = (
    "; its heads are reshaped to two dims that the devices share, so backends "
    f"gather tensors in attention, {NOT_PREDICTED}"
)
# Of a kernel whose input or output is split along a dim that it is not.
DISAGREES = (
    "; its input or output is split along a dim that it is not, so backends "
    f"gather or scatter, {NOT_PREDICTED}"
)
# Of a kernel whose layer's output is needed whole.
GATHERED = "; the layer's output is gathered"
# Of a dim that the devices do not divide.
UNEVEN = "; {} does not divide by {}, so the last device holds less"
# Of a fused projection that is split.
EACH_BLOCK = "; each of its {} blocks is split"
# Why a fused projection is whole, and how it could be split.
IN_BLOCKS = "{} blocks in one dim, and {}"
INSTEAD = "; give them a dim of their own, or let each head have its blocks"
NOT_HERE = "this backend has no dims of blocks"
