"""A report of `compile_for` as one self-contained HTML page."""

import html

_STYLE = """
body { font: 14px/1.4 system-ui, sans-serif; margin: 2em auto; max-width: 60em;
  padding: 0 1em; color: #222; background: #fff; }
h1 { font-size: 1.4em; } h2 { font-size: 1.1em; margin: 1.4em 0 .3em; }
table { border-collapse: collapse; width: 100%; }
th { text-align: right; font-weight: normal; color: #666; }
td, th { padding: .2em .5em; border-bottom: 1px solid #eee;
  vertical-align: top; }
td.number { text-align: right; font-family: ui-monospace, monospace; }
th:first-child, td:first-child { text-align: left; white-space: pre; }
.bar { height: 1.2em; display: flex; margin: .3em 0; border: 1px solid #999; }
.bar span { display: block; height: 100%; }
.one { background: #2563eb; } .two { background: #f59e0b; }
.three { background: #b91c1c; }
"""


def page(report):
    """Returns a report as the text of an HTML page without scripts.

    Args:
        report: `CompileReport`.
    """
    title = html.escape(report.title())
    memory, seconds = report.memory, report.seconds
    kept = memory.get("arguments", 0)
    body = [
        f"<h1>{title}</h1>",
        f"<p>Memory of a device: {html.escape(report.verdict())}. "
        "<span class='one'>&emsp;</span> arguments "
        "<span class='two'>&emsp;</span> outputs and temporaries</p>",
        _bar((kept, report.peak - kept), max(report.memory_limit, report.peak)),
        f"<p>Step: at least {1000 * seconds['step']:.2f} ms. "
        "<span class='one'>&emsp;</span> computations "
        "<span class='three'>&emsp;</span> communication that they do not "
        "hide</p>",
        _bar((seconds["compute"], 0, seconds["exposed"]), seconds["step"] or 1),
        "<h2>One device</h2>",
        _table((), report.rows()),
        "<h2>Collectives</h2>",
        _table(report.collective_headings, report.collective_rows()),
        *(f"<p>{html.escape(note)}</p>" for note in report.notes()),
    ]
    return (
        "<!doctype html>\n<html lang='en'><head><meta charset='utf-8'>"
        "<meta name='viewport' content='width=device-width'>"
        f"<title>{title}</title><style>{_STYLE}</style></head>\n<body>\n"
        + "\n".join(body)
        + "\n</body></html>\n"
    )


def _bar(parts, whole):
    spans = "".join(
        f"<span class='{name}' style='width: {100 * part / whole:.2f}%'></span>"
        for name, part in zip(("one", "two", "three"), parts)
    )
    return f"<div class='bar'>{spans}</div>"


def _table(headings, rows):
    lines = ["<table>"]
    if headings:
        cells = "".join(f"<th>{html.escape(cell)}</th>" for cell in headings)
        lines.append(f"<tr>{cells}</tr>")
    for first, *rest in rows:
        cells = "".join(
            f"<td class='number'>{html.escape(cell)}</td>" for cell in rest
        )
        lines.append(f"<tr><td>{html.escape(first)}</td>{cells}</tr>")
    return "\n".join([*lines, "</table>"])
