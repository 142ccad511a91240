"""A report of `compile_for` as an HTML page, and as a piece of one."""

import html

from keras_tp.distribution.pages import charts
from keras_tp.distribution.pages import findings
from keras_tp.distribution.pages import template
from keras_tp.distribution.tensor_layout import format_bytes

# The share of a step from which waiting for communication is a problem.
_NOTABLE_SHARE = 0.2


def page(report):
    """Returns a report as the text of one HTML file.

    Args:
        report: `CompileReport`.
    """
    title, line = _title(report)
    body = [
        template.top(title, line),
        template.findings(_findings(report)),
        template.card("Memory of a device", _memory(report)),
        template.card("Time of a step, at least", _time(report)),
        template.card("Collectives", _collectives(report)),
        template.card("One device", template.table((), report.rows())),
        *(f"<p class='faint'>{html.escape(s)}</p>" for s in report.notes()),
    ]
    return template.page(title, body)


def piece(report):
    """Returns the findings, the memory and the time, for a notebook.

    Args:
        report: `CompileReport`.
    """
    body = [
        template.findings(_findings(report)),
        *("<p>Memory of a device</p>", _memory(report)),
        *("<p>Time of a step, at least</p>", _time(report)),
    ]
    return template.piece(*_title(report), body)


def _title(report):
    name, _, rest = report.title().partition(", mesh ")
    return name, f"mesh {rest}"


def _findings(report):
    found = []
    share = report.communication_share
    kinds = report.collectives
    longest = max(kinds, key=lambda kind: kinds[kind]["seconds"], default=None)
    if not report.fits:
        found.append(
            findings.Finding(
                findings.PROBLEM,
                f"The step {report.verdict()} on each device.",
                "",
            )
        )
    if share > _NOTABLE_SHARE:
        name = charts.NAMES.get(longest, longest)
        found.append(
            findings.Finding(
                findings.PROBLEM,
                f"A device waits for communication in {share:.0%} of the step.",
                f"Most of it is {name}: {_count(kinds[longest])}.",
            )
        )
    if report.fits:
        found.append(
            findings.Finding(
                findings.GOOD,
                f"The step {report.verdict()} on each device.",
                "",
            )
        )
    return found


def _count(row):
    return f"{row['count']} tensors of {format_bytes(row['bytes'])} together"


def _memory(report):
    kept = report.memory.get("arguments", 0)
    parts = {"arguments": kept, "temporaries": report.peak - kept}
    limit = report.memory_limit
    return _bar(parts, max(limit, report.peak), limit, format_bytes)


def _time(report):
    seconds = report.seconds
    parts = {"computations": seconds["compute"], "waiting": seconds["exposed"]}
    return _bar(parts, seconds["step"], None, _milliseconds)


def _bar(parts, whole, limit, text_of):
    label = ", ".join(
        f"{charts.NAMES[name]} {text_of(size)}" for name, size in parts.items()
    )
    over = " over" if limit is not None and whole > limit else ""
    of = f"of {text_of(limit)}" if limit is not None else ""
    return (
        f"<p><span class='total'>{text_of(sum(parts.values()))}</span> "
        f"<span class='verdict{over}'>{of}</span></p>"
        f"{charts.bar(parts, whole, 34, limit, label)}"
        f"{charts.legend(parts, text_of)}"
    )


def _collectives(report):
    kinds = report.collectives
    most = max((row["bytes"] for row in kinds.values()), default=0)
    lines = [
        "<div class='sent device'><span>"
        f"{html.escape(charts.NAMES.get(kind, kind))}</span>"
        f"{charts.bar({kind: row['bytes']}, most, 12, label=kind)}"
        f"<span><b>{format_bytes(row['bytes'])}</b> <span class='faint'>in "
        f"{row['count']:g}</span></span></div>"
        for kind, row in kinds.items()
    ]
    headings, rows = report.collective_headings, report.collective_rows()
    return "".join(lines) + template.table(headings, rows)


def _milliseconds(seconds):
    return f"{1000 * seconds:.2f} ms"
