"""Finds fused projections that have to stay whole.

Each backend has a product whose result is kept as blocks, until a reshape or a
split takes them. Another operation that reads them would gather them.
"""

from keras_tp.distribution.planning.rules import rule_for
from keras_tp.distribution.planning.rules_math import elementwise

# Operations that a fused projection may pass between its matmul and the
# operation that cuts it to blocks.
_BETWEEN = ("Add", "Cast")


def find_cuts(planner):
    """Returns a dict of class to the operation that keeps blocks whole."""
    fused = {}
    for value in planner.graph.values:
        for i, size in enumerate(value.shape):
            root, blocks = planner.class_of((value.index, i))
            if size > 1 and blocks > 1:
                fused[value.index] = i, root
    found = {}
    made_by = {value.index: "variable" for value in planner.graph.variables}
    for step in planner.graph.steps:
        values = [*step.inputs, *step.variables]
        for value in values:
            if value.index in fused:
                dim, root = fused[value.index]
                if not _keeps_blocks(step, value, dim, made_by):
                    found.setdefault(
                        root, f"{step.kind} in {step.path!r} reads them"
                    )
        made_by.update((value.index, step.kind) for value in step.outputs)
    return found


def _keeps_blocks(step, value, dim, made_by):
    """Returns whether a step reads a dim of blocks without a gather."""
    if step.is_leaf:
        # Layers of gates.
        return step.kind in ("LSTM", "GRU")
    if step.kind == "Matmul":
        is_kernel = made_by.get(value.index) in ("variable", "Cast")
        return is_kernel and (value.ndim, dim) == (2, 1)
    if step.kind == "Split":
        return made_by.get(value.index) in ("Matmul", *_BETWEEN)
    return step.kind in ("Reshape", *_BETWEEN) or rule_for(step) is elementwise
