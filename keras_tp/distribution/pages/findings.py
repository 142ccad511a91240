"""Sentences about a plan or a report, the biggest problem first."""

import collections
import re

from keras_tp.distribution.planning import folding
from keras_tp.distribution.planning import plan_text
from keras_tp.distribution.planning.plan_rows import NOT_PREDICTED
from keras_tp.distribution.tensor_layout import axis_size
from keras_tp.distribution.tensor_layout import format_bytes

PROBLEM, NOTE, GOOD = "problem", "note", "good"
# The share of a device's bytes from which variables that are whole are named.
_NOTABLE_SHARE = 0.05
# At most this many of them.
_MOST_WHOLE = 3


class Finding(collections.namedtuple("Finding", "level text detail")):
    """A sentence, with names in backticks, and what explains it.

    Args:
        level: One of `"problem"`, `"note"` and `"good"`.
        text: String.
        detail: String; may be empty.
    """


def whole_variables(groups, held, count):
    """Returns a `Finding` for each large group of variables that are whole.

    Args:
        groups: List of `(paths, nbytes, why)`: the paths of repeated
            variables, the bytes of all of them on one device, and the reason.
        held: Int, the bytes of all variables on one device.
        count: Int, the number of devices that could split them.
    """
    found = []
    for paths, nbytes, why in sorted(groups, key=lambda group: -group[1]):
        if count == 1 or nbytes < _NOTABLE_SHARE * held:
            continue
        times = f"{len(paths)} x " * (len(paths) > 1)
        verb = "are" if len(paths) > 1 else "is"
        text = (
            f"{times}`{folding.span(paths)}` {verb} whole on each device: "
            f"{format_bytes(nbytes)} of {format_bytes(held)}."
        )
        saved = nbytes - nbytes // count
        detail = (
            f"Split over {count} devices, each would hold "
            f"{format_bytes(saved)} less, and as much less of its gradient "
            f"and of each slot. Reason: {_once(why)}."
        )
        found.append(Finding(PROBLEM, text, detail))
    return found[:_MOST_WHOLE]


def of_plan(plan, folds, memory, assumed):
    """Returns the `Finding`s of a plan, the biggest problem first.

    Args:
        plan: `ShardingPlan`.
        folds: List of `Fold`.
        memory: Dict, as `ShardingPlan.memory` returns it.
        assumed: String that says for which step that is.
    """
    count = axis_size(plan.device_mesh, plan.axis)
    groups = []
    for fold in folds:
        for position, layer in enumerate(fold.sample):
            for index, row in enumerate(layer.rows):
                if row.is_split or len(row.shape) < 2:
                    continue
                paths = [m[position].rows[index].path for m in fold.members]
                nbytes = plan.device_bytes(row) * fold.times
                groups.append((paths, nbytes, row.why))
    found = whole_variables(groups, memory["parameters"], count)
    found += [
        Finding(PROBLEM, text, "") for text in plan_text.without_rule(plan)
    ]
    others = [row for row in plan.variables if not row.is_predicted]
    if others:
        text = (
            f"{len(others)} variables cause collectives, {NOT_PREDICTED}. "
            f"The first is `{others[0].path}`."
        )
        found.append(Finding(NOTE, text, f"Reason: {_once(others[0].why)}."))
    share = memory["activations"] / max(memory["total"], 1)
    if share > 0.5:
        sums = plan.reductions
        is_split = any(row.scattered for row in sums)
        has_sequence = any(row.size.length for row in sums)
        hint = ""
        if has_sequence and not is_split:
            hint = "`sequence_parallel=True` splits those between layers."
        text = f"Activations are {share:.0%} of the memory of a step {assumed}."
        found.append(Finding(NOTE, text, hint))
    return found + [_of_split(plan, memory["parameters"])]


def _once(why):
    """Returns a reason; one that is the same for all dims is said once."""
    texts = set(re.split(r"(?:^|; )dim \d+: ", why)) - {""}
    return texts.pop() if len(texts) == 1 else why.rstrip(".")


def _of_split(plan, held):
    total = sum(row.nbytes for row in plan.variables)
    text = (
        f"{plan.split_share:.1%} of the matrices are split: each device holds "
        f"{format_bytes(held)} of {format_bytes(total)} of weights."
    )
    return Finding(GOOD, text, "")
