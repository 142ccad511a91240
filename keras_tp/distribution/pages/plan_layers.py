"""The layers of a plan in the order of the forward pass, for a page."""

import collections
import itertools

from keras_tp.distribution.planning import folding
from keras_tp.distribution.tensor_layout import axis_names

COLUMN, ROW, WHOLE, UNUSED = "column", "row", "whole", "unused"
# In the obstacles of variables that the traced forward pass does not use.
_NOT_USED = "not in the forward pass"


class Layer(collections.namedtuple("Layer", "path rows sums gathers axis")):
    """A layer of a plan.

    Args:
        path: String; that of the model's own variables is empty.
        rows: List of `PlannedVariable`. Empty for sums between layers.
        sums: List of `PlannedReduction`.
        gathers: List of `PlannedGather`.
        axis: String, the mesh axis that splits the model, or `None`.
    """

    @property
    def mark(self):
        """How its matrices are split: along their outputs or their inputs."""
        split = [row for row in self.rows if self.is_split(row)]
        if self.rows and all(is_unused(row) for row in self.rows):
            return UNUSED
        if any(not row.backward for row in self.sums) and split:
            return ROW
        return COLUMN if any(len(row.shape) > 1 for row in split) else WHOLE

    @property
    def main(self):
        """The largest of its variables, a split one if there is any."""
        return max(self.rows, key=lambda row: (self.is_split(row), row.nbytes))

    def is_split(self, row):
        """Returns whether each device computes with a part of a variable.

        A variable that is only split over the batch axis is gathered before it
        is used.
        """
        return any(self.axis in axis_names(entry) for entry in row.axes)


def is_unused(row):
    """Returns whether the forward pass does not use a `PlannedVariable`."""
    return any(text.startswith(_NOT_USED) for text in row.obstacles)


def layers_of(plan):
    """Returns the `Layer`s of a plan.

    Args:
        plan: `ShardingPlan`.
    """
    left, found = list(plan.gathers), []
    for path, rows, sums in in_order(plan):
        own = [row for row in left if rows and row.path == path]
        left = [row for row in left if row not in own]
        if rows or not sums:
            found.append(Layer(path, rows, sums, own, plan.axis))
            continue
        # Sums of operations between layers.
        for where, group in itertools.groupby(sums, lambda row: row.path):
            found.append(Layer(where, [], list(group), [], plan.axis))
    return found


def folds_of(plan):
    """Returns the `Fold`s of the layers of a plan."""
    return folding.grouped(folding.fold(layers_of(plan), _key))


def _key(layer):
    """Returns a value that is equal for layers that are alike."""
    bare = folding.without_numbers
    return (
        bare(layer.path),
        tuple((bare(row.path), *row[1:6], bare(row.why)) for row in layer.rows),
        tuple((bare(row.path), *row[1:]) for row in layer.sums),
        tuple((bare(row.path), *row[1:]) for row in layer.gathers),
    )


def in_order(plan):
    """Yields layers with their variables and sums, and sums between layers.

    Both lists of a plan are in the order of the forward pass. Layers that have
    variables and sums align the two lists. Other sums, of an operation between
    layers or of a table that is used again, come before the next such layer.

    Yields:
        `(path, variables, sums)`; `variables` is empty for sums between layers.
    """
    grouped = itertools.groupby(
        plan.variables, key=lambda row: row.path.rpartition("/")[0]
    )
    layers = [(path, list(rows)) for path, rows in grouped]
    left = list(plan.reductions)
    for k, (path, variables) in enumerate(layers):
        ahead = {path for path, _ in layers[k:]}
        placed = [i for i, row in enumerate(left) if row.path in ahead]
        start = end = placed[0] if placed else len(left)
        while end < len(left) and left[end].path == path:
            end += 1
        if start < end:
            if start > 0:
                yield "", [], left[:start]
            yield path, variables, left[start:end]
            left = left[end:]
        else:
            yield path, variables, []
    if left:
        yield "", [], left
