"""A plan as a table for a terminal."""

from keras_tp.distribution.planning import folding
from keras_tp.distribution.planning import tables
from keras_tp.distribution.planning.plan_rows import NOT_PREDICTED
from keras_tp.distribution.tensor_layout import axis_sizes
from keras_tp.distribution.tensor_layout import format_bytes


def table(plan):
    """Returns a plan as text: path, shape, layout, size, why.

    Repeated layers are shown once.
    """
    columns = {
        **dict.fromkeys(("variable", "shape", "layout"), tables.FOLD),
        "MiB per device": tables.RIGHT,
        "why": tables.FOLD,
    }

    def row_of(row, name):
        held = f"{plan.device_bytes(row) / 2**20:.3f}"
        return name, str(row.shape), _layout(row), held, row.why

    groups, said = folding.groups(plan.variables, _key, row_of)
    return tables.listing(
        *(f"Sharding plan of {plan.model_name}", columns, groups),
        *said,
        _totals(plan),
        *without_rule(plan),
    )


def _key(row):
    bare = folding.without_numbers
    obstacles = tuple(map(bare, row.obstacles))
    return (bare(row.path), *row[1:6], bare(row.why), obstacles)


def without_rule(plan):
    """Returns a sentence for each operation without a rule, and its cost."""
    lines = []
    for kind, path in plan.without_rule.items():
        whole = [
            row.nbytes
            for row in plan.variables
            if not row.is_split and f"{kind} has no rule" in row.why
        ]
        lines.append(
            f"No rule for {kind} (first in {path!r}): its inputs and outputs "
            f"are not split. {len(whole)} variables of "
            f"{format_bytes(sum(whole))} stay whole because of it; see "
            "`register_rule`."
        )
    return lines


def _layout(row):
    if row.blocks > 1:
        return f"{row.axes} in {row.blocks} blocks"
    return str(row.axes) if row.is_split else "replicated"


def _totals(plan):
    total = sum(row.nbytes for row in plan.variables)
    held = sum(plan.device_bytes(row) for row in plan.variables)
    along = sum(row.scattered for row in plan.reductions)
    others = [row.path for row in plan.variables if not row.is_predicted]
    more = (
        f" {len(others)} variables cause others, {NOT_PREDICTED}, the first "
        f"is {others[0]!r}."
        if others
        else ""
    )
    return (
        f"Mesh {axis_sizes(plan.device_mesh)}: each device holds "
        f"{format_bytes(held)} of {format_bytes(total)}; "
        f"{plan.split_share:.1%} of the matrices are split; "
        f"{len(plan.reductions)} sums over the devices in a training step"
        + f", {along} of them along the sequence" * bool(along)
        + f", {len(plan.gathers)} outputs gathered" * bool(plan.gathers)
        + f".{more}"
    )
