"""A report of `describe` as an HTML page, and as a piece of one."""

import html

from keras_tp.distribution import report_text
from keras_tp.distribution import variable_origin
from keras_tp.distribution.pages import charts
from keras_tp.distribution.pages import findings
from keras_tp.distribution.pages import template
from keras_tp.distribution.pages import variables
from keras_tp.distribution.planning import folding
from keras_tp.distribution.tensor_layout import axis_names
from keras_tp.distribution.tensor_layout import format_bytes

# Devices that have a bar of their own.
_MOST_DEVICES = 64
_ROLES = (variable_origin.WEIGHT, variable_origin.SLOT)
# A device that holds this much more than another is worth a sentence.
_UNEVEN = 1.1


def page(report):
    """Returns a report as the text of one HTML file.

    Args:
        report: `ShardingReport`.
    """
    body = [
        template.top(f"Sharding of {report.model_name}", _line(report)),
        template.findings(_findings(report)),
        template.card("Memory of each device", _devices(report)),
        variables.section(_groups(report)),
    ]
    return template.page(f"Sharding of {report.model_name}", body)


def piece(report):
    """Returns the findings and the memory of a report, for a notebook.

    Args:
        report: `ShardingReport`.
    """
    return template.piece(
        f"Sharding of {report.model_name}",
        _line(report),
        [template.findings(_findings(report)), _devices(report)],
    )


def _line(report):
    return (
        f"{len(report.device_bytes)} devices, {len(report.rows)} variables; "
        "read from the live arrays"
    )


def _findings(report):
    held, total = report.device_bytes, report.total_bytes
    most, least = (f(held.values(), default=0) for f in (max, min))
    groups = []
    for fold in _folds(report):
        for index, row in enumerate(fold.sample):
            if not row.is_split and len(row.shape) > 1:
                nbytes = report_text.held_by_one(row) * fold.times
                groups.append((fold.paths(index), nbytes, row.why))
    found = findings.whole_variables(groups, most, _count(report))
    if most > _UNEVEN * least:
        name = max(held, key=held.get)
        other = min(held, key=held.get)
        found.append(
            findings.Finding(
                findings.NOTE,
                f"`{name}` holds {format_bytes(most)}, `{other}` only "
                f"{format_bytes(least)}.",
                "",
            )
        )
    share = report.split_bytes / total if total else 0
    text = (
        f"{share:.1%} of the bytes are split: a device holds at most "
        f"{format_bytes(most)} of {format_bytes(total)}."
    )
    level = findings.GOOD if len(held) > 1 else findings.NOTE
    return [*found, findings.Finding(level, text, "")]


def _count(report):
    """Returns the most parts that a variable is split into.

    It is the number of devices if nothing is split.
    """
    parts = [
        round(row.bytes / report_text.held_by_one(row))
        for row in report.rows
        if row.is_split
    ]
    return max(parts, default=len(report.device_bytes))


def _devices(report):
    """Returns a stack for each device: weights, slots, others."""
    by_device = {name: {} for name in sorted(report.device_bytes)}
    for row in report.rows:
        role = row.role if row.role in _ROLES else "other"
        for name, held in row.device_bytes.items():
            parts = by_device[name]
            parts[role] = parts.get(role, 0) + held
    most = max(report.device_bytes.values(), default=0)
    names = (*_ROLES, "other")
    lines = []
    for name, parts in list(by_device.items())[:_MOST_DEVICES]:
        parts = {role: parts.get(role, 0) for role in names}
        size = format_bytes(sum(parts.values()))
        lines.append(
            "<div class='sent device'><span class='mono'>"
            f"{html.escape(name)}</span>"
            f"{charts.bar(parts, most, 16, label=f'{name}: {size}')}"
            f"<span><b>{size}</b></span></div>"
        )
    left = len(by_device) - _MOST_DEVICES
    more = f"<p class='faint'>and {left} more devices</p>" * (left > 0)
    largest = {
        role: max((p.get(role, 0) for p in by_device.values()), default=0)
        for role in names
    }
    return "".join(lines) + more + charts.legend(largest)


def _folds(report):
    """Returns the folds of the weights and other variables, without slots."""
    rows = [row for row in report.rows if not row.slot_of]
    return folding.fold(rows, report_text.key)


def _groups(report):
    slots, groups = report_text.slots_by_path(report), []
    for fold in _folds(report):
        title, prefix = fold.title(), fold.prefix()
        rows = [
            _row(row, fold.paths(index), prefix, slots[row.path])
            for index, row in enumerate(fold.sample)
        ]
        if not title and groups and not groups[-1][0]:
            groups[-1][1].extend(rows)
        else:
            groups.append((title, rows))
    return groups


def _row(row, paths, prefix, slots):
    held = format_bytes(report_text.held_by_one(row))
    devices = ", ".join(
        f"{name} {format_bytes(size)}"
        for name, size in sorted(row.device_bytes.items())
    )
    details = [
        f"{held} of {format_bytes(row.bytes)} on each device; {row.dtype}; "
        f"{row.role}.",
        f"{devices}.",
    ]
    if slots:
        text = report_text.slots_text(row, slots)
        details.append(f"Optimizer slots on each device: {text}.")
    return variables.Row(
        name=folding.below(row.path, prefix) if prefix else folding.span(paths),
        paths=paths,
        mark=_mark(row),
        shape=row.shape,
        axes=row.axes,
        blocks=1,
        held=report_text.held_by_one(row),
        numbers="",
        why=row.why or f"split: {report_text.layout_text(row)}",
        details=details,
    )


def _mark(row):
    """Returns along which side a matrix is split, as its shape tells."""
    split = [i for i, axis in enumerate(row.axes or ()) if axis_names(axis)]
    if not split:
        return "whole"
    # The inputs of a kernel are its first dim, but those of a 2D convolution.
    inputs = 2 if len(row.shape) == 4 else 0
    return "row" if split[0] == inputs and len(row.shape) > 1 else "column"
