"""A report of `describe` as a table for a terminal."""

import collections

from keras_tp.distribution import variable_origin
from keras_tp.distribution.planning import folding
from keras_tp.distribution.planning import tables
from keras_tp.distribution.tensor_layout import format_bytes


def text(report, slots=False):
    """Returns a report as text, as wide as the terminal.

    Repeated layers have one row. The slots of a variable are a column, and
    other state is one line, unless all are asked for.

    Args:
        report: `ShardingReport`.
        slots: Boolean. Whether slots, metrics and random state have rows of
            their own. Defaults to `False`.
    """
    by_path = slots_by_path(report)
    rows, left = report.rows, []
    if not slots:
        rows = [row for row in rows if row.role == variable_origin.WEIGHT]
        left = _others(report)
    second = "role" if slots else "slots"
    columns = {
        **dict.fromkeys(("variable", "shape", "layout"), tables.FOLD),
        **dict.fromkeys(("per device", second), tables.RIGHT),
        "why": tables.FOLD,
    }

    def row_of(row, name):
        held = format_bytes(held_by_one(row))
        other = row.role if slots else slots_text(row, by_path[row.path])
        layout = layout_text(row)
        why = row.why
        if why and not row.is_split and row.axes is not None:
            why = f"whole: {why}"
        return name, str(row.shape), layout, held, other, why

    groups, said = folding.groups(rows, key, row_of)
    return tables.listing(
        *(f"Sharding of {report.model_name}", columns, groups),
        *said,
        *left,
        *_devices(report),
    )


def _devices(report):
    total = format_bytes(report.total_bytes)
    held = {
        device: format_bytes(size)
        for device, size in sorted(report.device_bytes.items())
    }
    sizes = set(held.values())
    if len(held) == 1:
        return [f"{', '.join(held)} holds all variables: {total}."]
    whole = f"All variables together have {total}."
    if len(sizes) == 1:
        return [f"Each of {len(held)} devices holds {sizes.pop()}. {whole}"]
    return [*(f"{name} holds {size}." for name, size in held.items()), whole]


def key(row):
    """Returns a value that is equal for rows of repeated layers."""
    bare = folding.without_numbers
    held = tuple(sorted(row.device_bytes.values()))
    return (bare(row.path), row.role, row.shape, row.axes, held, bare(row.why))


def layout_text(row):
    """Returns the layout of a `VariableReport` as text."""
    return "one device" if row.axes is None else str(row.axes)


def held_by_one(row):
    """Returns the most bytes of a `VariableReport` that one device holds."""
    return max(row.device_bytes.values(), default=0)


def slots_by_path(report):
    """Returns a dict of a weight's path to the rows of its slots."""
    found = collections.defaultdict(list)
    for row in report.rows:
        if row.slot_of:
            found[row.slot_of].append(row)
    return found


def slots_text(row, slots):
    """Returns the slots of a weight as text, such as `2 x 1.50 MiB`.

    Args:
        row: `VariableReport` of the weight.
        slots: List of `VariableReport`.
    """
    counted = collections.Counter()
    for slot in slots:
        differs = slot.axes != row.axes and slot.shape == row.shape
        further = ", split further" * bool(differs and slot.is_split)
        counted[f"{format_bytes(held_by_one(slot))}{further}"] += 1
    return "; ".join(
        f"{count} x {size}" if count > 1 else size
        for size, count in counted.items()
    )


def others(report):
    """Returns the rows that are no weights and no slots of one."""
    return [
        row
        for row in report.rows
        if row.role != variable_origin.WEIGHT and not row.slot_of
    ]


def _others(report):
    found = others(report)
    if not found:
        return []
    held = sum(map(held_by_one, found))
    counted = collections.Counter(row.role for row in found)
    words = {
        variable_origin.SLOT: "of the optimizer",
        variable_origin.METRIC: "of metrics",
        variable_origin.SEED: "of random state",
    }
    roles = ", ".join(
        f"{count} {words[role]}" for role, count in counted.items()
    )
    return [
        f"Not listed: {len(found)} other variables ({roles}), together "
        f"{format_bytes(held)} on each device. `describe(model, slots=True)` "
        "lists them."
    ]
