"""Says what the split of a variable communicates, for each of its dims."""

import math

from keras_tp.distribution.planning import reasons
from keras_tp.distribution.planning.graph import CONSTANT

_LOOKUP = "Take"
# Operations that a resized image passes on its way to a kernel.
_PASSED = ("Concatenate", "Reshape", "Transpose")


def find(planner):
    """Returns a dict of (index of a variable, class) to the effect of a split.

    Args:
        planner: The planner of `solver`.
    """
    found, of_known_rows, of_resized = {}, set(), set()
    resized = _resized(planner.graph)
    for partial in planner.dims.partials:
        use = _use(planner, partial)
        root, _ = planner.class_of(partial.node)
        for value in [*partial.step.inputs, *partial.step.variables]:
            for i in range(value.ndim):
                if planner.class_of((value.index, i))[0] == root:
                    key = planner.source(value), root
                    found.setdefault(key, use)
                    if not partial.backward and _knows_rows(partial.step):
                        of_known_rows.add(key)
                    if partial.backward and partial.tensor.index in resized:
                        of_resized.add(key)
    for key in of_known_rows:
        found[key] += reasons.KNOWN_ROWS
    for key in of_resized:
        found[key] += reasons.AFTER_A_RESIZE
    return found


def _resized(graph):
    """Returns the indices of values that are resized images."""
    found = set()
    for step in graph.steps:
        is_passed = step.kind in _PASSED and any(
            value.index in found for value in step.inputs
        )
        if step.kind == "Resize" or is_passed:
            found.update(value.index for value in step.outputs)
    return found


def _use(planner, partial):
    if partial.step.kind == _LOOKUP and not partial.backward:
        return reasons.ROW + " embedding: one all-reduce after the lookup"
    if all(map(planner.dims.is_weight, partial.step.inputs)):
        return "split like the kernel that LoRA adapts"
    if partial.backward:
        return reasons.COLUMN
    return reasons.ROW + ": one all-reduce of the output"


def _knows_rows(step):
    """Returns whether a compiler sees which rows of a table are looked up.

    XLA for GPUs gathers a table of which all rows are looked up, in their
    order, and sends a single row. It sums over the devices for other rows.
    """
    if step.kind != _LOOKUP or step.inputs[1].kind != CONSTANT:
        return False
    rows = step.inputs[0].shape[step.operation.axis]
    shape = step.inputs[1].shape
    return rows in shape or math.prod(shape) == 1
