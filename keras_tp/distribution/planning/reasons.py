"""What a plan says of a split: why it was chosen, and what it costs."""

from keras_tp.distribution.planning.plan_rows import NOT_PREDICTED
from keras_tp.distribution.tensor_layout import format_bytes

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
# Of a table, or of several lookups of it.
KNOWN_ROWS = (
    "; each step looks up one known row, or all rows, so XLA may gather or "
    f"send rows, {NOT_PREDICTED}"
)
# Of a kernel that reads resized images.
AFTER_A_RESIZE = (
    "; torch adds up that gradient after it has passed a resize, in another "
    f"number of bytes, {NOT_PREDICTED}"
)
# Of a kernel of LSTM and the like.
IN_A_LOOP = f"; backends communicate at each time step, {NOT_PREDICTED}"
# Of a kernel whose layer's output is needed whole.
GATHERED = "; the layer's output is gathered"
# Of a dim that the devices do not divide.
UNEVEN = "; {} does not divide by {}, so the last device holds less"
# Of kernels beside activations that are split along the sequence.
COLUMN_OF_SEQUENCE = "column-parallel: its input is gathered along the sequence"
SUMMED, SCATTERED = "one all-reduce", "one reduce-scatter"
NEEDED_WHOLE = (
    "; {} needs what it returns whole or combines it with whole activations, "
    f"so backends gather, {NOT_PREDICTED}"
)
# Of a fused projection that is split.
EACH_BLOCK = "; each of its {} blocks is split"
# Why a fused projection is whole, and how it could be split.
IN_BLOCKS = "{} blocks in one dim, and {}"
INSTEAD = "; give them a dim of their own, or let each head have its blocks"
NOT_HERE = "this backend has no dims of blocks"


def not_alone(saved, enough, count, sizes):
    """Returns why a class is not split that no operation sums over.

    Args:
        saved: Int, the bytes of its variables.
        enough: Float, the bytes that they would need to have.
        count: Int, number of devices along the axis that splits variables.
        sizes: List of `Size`, the bytes that it would communicate.
    """
    saved, enough = (size - size / count for size in (saved, enough))
    return (
        f"saves {format_bytes(saved)} per device (a split that no operation "
        f"sums over has to save {format_bytes(enough)}), and communicates "
        f"{_per_example(sizes)}"
    )


def other_dim(dim, sizes, chosen):
    """Returns why a kernel is not split along another dim.

    Args:
        dim: Int, the other dim.
        sizes: List of `Size`, the bytes that it would communicate.
        chosen: List of `Size`, the bytes that the split communicates.
    """
    return (
        f"; along dim {dim} it would communicate {_per_example(sizes)}, not "
        f"{format_bytes(_bytes(chosen))}"
    )


def goes_with(members, free, by_path, taken):
    """Returns why a class is not split whose largest variables are not free.

    Args:
        members: List of `(path, dim, blocks)`, all variables of the class.
        free: Dict whose keys are the paths that could still be split.
        by_path: Dict of path to value.
        taken: Dict of path to `(dim, blocks)` of the variables that are split
            in another way.
    """
    path, dim, _ = max(
        (member for member in members if member[0] not in free),
        key=lambda member: by_path[member[0]].nbytes,
    )
    how = "not split along it"
    if path in taken:
        how = f"split along dim {taken[path][0]} instead"
    return f"goes with dim {dim} of {path!r}, which is {how}"


def one_element(shape):
    """Returns why a variable with one element is not split."""
    return "it has one element" if shape else "a scalar"


def _per_example(sizes):
    per_position = " and position" * any(size.length for size in sizes)
    return f"{format_bytes(_bytes(sizes))} per example{per_position}"


def _bytes(sizes):
    return sum(size.at(1, 1) for size in sizes)
