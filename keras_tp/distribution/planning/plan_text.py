"""A plan as a table for a terminal, and as one HTML page."""

import html
import itertools

from keras_tp.distribution.planning import tables
from keras_tp.distribution.planning.plan_rows import NOT_PREDICTED
from keras_tp.distribution.tensor_layout import axis_sizes
from keras_tp.distribution.tensor_layout import format_bytes

_STYLE = """
body { font: 14px/1.4 system-ui, sans-serif; margin: 2em auto; max-width: 70em;
  padding: 0 1em; color: #222; background: #fff; }
h1 { font-size: 1.4em; } h2 { font-size: 1em; margin: 1.4em 0 .3em;
  font-family: ui-monospace, monospace; overflow-wrap: anywhere; }
table { border-collapse: collapse; width: 100%; table-layout: fixed; }
td { padding: .2em .5em; border-bottom: 1px solid #eee; vertical-align: top;
  overflow-wrap: anywhere; }
td.name, td.shape { font-family: ui-monospace, monospace; }
td.name { width: 22%; } td.shape { width: 26%; } td.size { width: 10%;
  text-align: right; } .dim { padding: 0 .3em; border-radius: 3px; }
.split { background: #2563eb; color: #fff; }
.blocks { background: #f59e0b; } .whole { background: #e5e7eb; }
.sum { margin: .3em 0; color: #b91c1c; }
.sum::before { content: "\\2211  "; }
.gather::before { content: "\\222a  "; }
.bar { height: 1.2em; display: flex; margin: .3em 0; }
.bar span { display: block; height: 100%; }
"""


def table(plan):
    """Returns a plan as text: path, shape, layout, size, why.

    A long table shows repeated layers once.
    """
    columns = {
        **dict.fromkeys(("variable", "shape", "layout"), tables.FOLD),
        "MiB per device": tables.RIGHT,
        "why": tables.FOLD,
    }
    rows = [
        (
            row.path,
            str(row.shape),
            _layout(row),
            f"{plan.device_bytes(row) / 2**20:.3f}",
            row.why,
        )
        for row in plan.variables
    ]
    rows, said = tables.repeats_joined(rows)
    return tables.text_of(
        (f"Sharding plan of {plan.model_name}", columns, rows),
        *([said] if said else []),
        _totals(plan),
        *_without_rule(plan),
    )


def _without_rule(plan):
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


def page(plan):
    """Returns a plan as the text of an HTML page without scripts.

    Layers are in the order of the forward pass. Each lists its variables: the
    split dim in colour, the bytes on one device, and the reason. The sums over
    the devices are between the layers.
    """
    body = [
        f"<h1>Sharding plan of {html.escape(plan.model_name)}</h1>",
        f"<p>{html.escape(_totals(plan))}</p>",
        _bar(plan),
        "<p>Dims: <span class='dim split'>split</span> "
        "<span class='dim blocks'>each block split</span> "
        "<span class='dim whole'>whole</span></p>",
    ]
    body += [f"<p>{html.escape(line)}</p>" for line in _without_rule(plan)]
    gathers = list(plan.gathers)
    for layer, variables, sums in _in_order(plan):
        if variables:
            name = html.escape(layer or plan.model_name)
            body.append(f"<h2>{name}</h2><table>")
            body += [_row(plan, row) for row in variables]
            body.append("</table>")
        body += [_sum(row, row.path if not variables else "") for row in sums]
        body += [_gather(row) for row in gathers if row.path == layer]
        gathers = [row for row in gathers if row.path != layer]
    return (
        "<!doctype html>\n<html lang='en'><head><meta charset='utf-8'>"
        "<meta name='viewport' content='width=device-width'>"
        f"<title>{html.escape(plan.model_name)}</title>"
        f"<style>{_STYLE}</style></head>\n<body>\n"
        + "\n".join(body)
        + "\n</body></html>\n"
    )


def _in_order(plan):
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


def _bar(plan):
    total = sum(row.nbytes for row in plan.variables)
    held = sum(plan.device_bytes(row) for row in plan.variables)
    split = sum(plan.device_bytes(r) for r in plan.variables if r.is_split)
    widths = [100 * part / max(total, 1) for part in (split, held - split)]
    return (
        "<p>Bytes on one device, of the whole model's:</p><div class='bar' "
        "style='border: 1px solid #999'>"
        f"<span class='split' style='width: {widths[0]:.2f}%'></span>"
        f"<span class='whole' style='width: {widths[1]:.2f}%'></span></div>"
    )


def _row(plan, row):
    dims = []
    for size, axis in zip(row.shape, row.axes):
        kind = "whole"
        if axis is not None:
            kind = "split" if row.blocks == 1 else "blocks"
        text = f"{size}" if axis is None else f"{size} {axis}"
        dims.append(f"<span class='dim {kind}'>{html.escape(text)}</span>")
    cells = (
        ("name", html.escape(row.path.rpartition("/")[2])),
        ("shape", " ".join(dims) or "scalar"),
        ("size", format_bytes(plan.device_bytes(row))),
        ("why", html.escape(row.why)),
    )
    inside = "".join(f"<td class='{name}'>{text}</td>" for name, text in cells)
    return f"<tr>{inside}</tr>"


def _sum(row, path=""):
    what = "gradient of its input" if row.backward else "output"
    where = f"{html.escape(path)}: " if path else ""
    kept = " and split along the sequence" if row.scattered else ""
    return (
        f"<p class='sum'>{where}{html.escape(row.operation)}: its {what} is "
        f"summed over the devices{kept}, {_growth(row.size)}</p>"
    )


def _gather(row):
    return (
        "<p class='sum gather'>The layer's output is gathered from the "
        f"devices, {_growth(row.size)}</p>"
    )


def _growth(size):
    """Returns the text of a `Size`."""
    text = format_bytes(size.coefficient)
    batch = f"(batch + {size.added:g})" if size.added else "batch"
    text += f" x {batch}" if size.batch else ""
    length = f"(length + {size.offset:g})" if size.offset else "length"
    return text + f" x {length}" * size.length
