"""A plan as an HTML page, as a piece of one, and as a picture."""

import html

from keras_tp.distribution.accelerators import ACCELERATORS
from keras_tp.distribution.pages import charts
from keras_tp.distribution.pages import dataflow
from keras_tp.distribution.pages import figures
from keras_tp.distribution.pages import findings
from keras_tp.distribution.pages import plan_layers
from keras_tp.distribution.pages import template
from keras_tp.distribution.pages import variables
from keras_tp.distribution.planning import cost
from keras_tp.distribution.planning import folding
from keras_tp.distribution.planning import predictions
from keras_tp.distribution.tensor_layout import axis_size
from keras_tp.distribution.tensor_layout import axis_sizes
from keras_tp.distribution.tensor_layout import format_bytes

# Layers that communicate, and that are shown without a click.
_MOST_BARS = 24
_MARKS = {plan_layers.COLUMN: "column", plan_layers.ROW: "row"}


def page(
    plan,
    batch_size=None,
    sequence_length=None,
    optimizer="adam",
    target=None,
):
    """Returns a plan as the text of one HTML file.

    Args:
        plan: `ShardingPlan`.
        batch_size: Int, the global batch size of the step that it shows
            first. Defaults to 8 for each replica of the model.
        sequence_length: Int, its sequence length. Defaults to 1024, if the
            plan needs one.
        optimizer: String, as `ShardingPlan.memory` takes it. Defaults to
            `"adam"`.
        target: String, an accelerator that `compile_for` knows, whose memory
            is shown beside. Defaults to `None`.
    """
    step = figures.step_of(plan, batch_size, sequence_length, optimizer, target)
    folds = plan_layers.folds_of(plan)
    memory = predictions.memory(plan, *step[:3])
    rows = figures.communication_rows(plan, folds)
    count = axis_size(plan.device_mesh, plan.axis)
    body = [
        template.top(f"Sharding plan of {plan.model_name}", _mesh_line(plan)),
        template.findings(findings.of_plan(plan, folds, memory, str(step))),
        "<div class='grid'><div>",
        template.card(
            "A training step on each device, as predicted",
            _controls(step),
            _memory(memory, step),
        ),
        _communication(plan, rows, step),
        "</div>",
        template.card(
            "Dataflow",
            dataflow.legend(plan),
            f"<div class='scroll'>{dataflow.svg(plan, folds)}</div>",
        ),
        "</div>",
        variables.section(_groups(plan, folds), count),
    ]
    data = figures.data_of(plan, rows, step)
    return template.page(f"Plan of {plan.model_name}", body, data)


def piece(plan):
    """Returns the findings, the memory and the layers as HTML, for a notebook.

    Args:
        plan: `ShardingPlan`.
    """
    step = figures.step_of(plan, None, None, "adam", None)
    folds = plan_layers.folds_of(plan)
    memory = predictions.memory(plan, *step[:3])
    found = findings.of_plan(plan, folds, memory, str(step))
    return template.piece(
        f"Sharding plan of {plan.model_name}",
        _mesh_line(plan),
        [
            template.findings(found),
            _memory(memory, step),
            f"<p class='faint'>{html.escape(f'A training step {step}.')}</p>",
            "<details class='fold'><summary>Dataflow</summary>"
            f"<div class='narrow'>{dataflow.svg(plan, folds)}</div></details>",
        ],
    )


def picture(plan):
    """Returns the dataflow of a plan as the text of an SVG file.

    Args:
        plan: `ShardingPlan`.
    """
    folds = plan_layers.folds_of(plan)
    inside, height = dataflow.picture(plan, folds)
    return template.picture(inside, dataflow.WIDTH, height)


def _mesh_line(plan):
    sizes = axis_sizes(plan.device_mesh)
    mesh = " x ".join(f"{name} {size}" for name, size in sizes.items())
    count = plan.device_mesh.devices.size
    return f"{count} devices ({mesh}), {len(plan.variables)} variables"


def _controls(step):
    """Returns the inputs for the step; the script of the page enables them."""

    def number(name, label, value):
        return (
            f"<label>{label} <input id='ktp-{name}' type='number' min='1' "
            f"value='{value}' disabled></label>"
        )

    def choice(name, label, options, chosen):
        inside = "".join(
            f"<option value='{value}'{' selected' * (value == chosen)}>"
            f"{html.escape(text)}</option>"
            for value, text in options.items()
        )
        return (
            f"<label>{label} <select id='ktp-{name}' disabled>{inside}"
            "</select></label>"
        )

    found = [number("batch", "batch", step.batch_size)]
    if step.length:
        found.append(number("length", "length", step.length))
    names = {name: name for name in sorted(cost.SLOTS)}
    found.append(choice("optimizer", "optimizer", names, step.optimizer))
    targets = {name: row.title for name, row in ACCELERATORS.items()}
    found.append(
        choice("target", "on", {"": "any device", **targets}, step.target or "")
    )
    return f"<div class='controls'>{''.join(found)}</div>"


def _memory(memory, step):
    """Returns the memory of a device as a stack, beside its size."""
    parts = {name: memory.get(name, 0) for name in figures.PARTS}
    if not parts["gathered"]:
        del parts["gathered"]
    total, limit, verdict, over = memory["total"], None, "on each device", ""
    if step.target:
        target = ACCELERATORS[step.target]
        limit = target.memory
        over = " over" if total > limit else ""
        word = "does not fit in" if over else "of"
        verdict = f"{word} {format_bytes(limit)} ({target.title})"
    label = ", ".join(
        f"{charts.NAMES[name]} {format_bytes(size)}"
        for name, size in parts.items()
    )
    whole = max(total, limit or 0)
    return (
        "<div id='ktp-memory'><p><span class='total' id='ktp-total'>"
        f"{format_bytes(total)}</span> <span class='verdict{over}' "
        f"id='ktp-verdict'>{html.escape(verdict)}</span></p>"
        f"{charts.bar(parts, whole, 34, limit, label)}"
        f"{charts.legend(parts)}</div>"
    )


def _communication(plan, rows, step):
    """Returns a bar for each layer that communicates."""
    batch = step.batch_size // predictions.replicas(plan)
    sent = [row.totals(batch, step.length) for row in rows]
    most = max((sum(totals.values()) for totals in sent), default=0)
    every = sum(sum(totals.values()) for totals in sent)
    kinds = [kind for kind in figures.KINDS if any(t[kind] for t in sent)]
    lines = [
        _sent(index, row, totals, most)
        for index, (row, totals) in enumerate(zip(rows, sent))
    ]
    counts = plan.collectives(step.batch_size, step.length)
    said = ", ".join(
        f"{count.count} x {charts.NAMES[kind]}"
        for kind, count in counts.items()
        if count.count
    )
    head = (
        f"<p><span class='total' id='ktp-sent'>{format_bytes(every)}</span> "
        f"<span class='faint'>in results: {said}</span></p>"
        if rows
        else "<p>A step sends nothing between the devices.</p>"
    )
    body = [head, charts.legend(dict.fromkeys(kinds, 0), text_of=None)]
    body += lines[:_MOST_BARS]
    if lines[_MOST_BARS:]:
        left = len(lines) - _MOST_BARS
        body.append(
            f"<details class='fold'><summary>{left} more</summary>"
            f"{''.join(lines[_MOST_BARS:])}</details>"
        )
    return template.card("Communication of each layer", *body)


def _sent(index, row, totals, most):
    reasons = dict.fromkeys(own.reason for own in row.communications)
    said = {"forward": "forward", "backward": "backward", "variable": "weights"}
    title = html.escape(f"{row.label}: {', '.join(said[r] for r in reasons)}")
    times = f"{row.times} x " * (row.times > 1)
    size = format_bytes(sum(totals.values()))
    number = len(row.communications)
    return (
        f"<div class='sent' data-row='{index}' title='{title}'>"
        f"<span class='mono'>{times}{template.path(row.name)}</span>"
        f"{charts.bar(totals, most, 12, label=title)}"
        f"<span><b data-sum>{size}</b> <span class='faint'>in {number}"
        "</span></span></div>"
    )


def _groups(plan, folds):
    """Returns the rows of the table of variables, by repeated block."""
    groups = []
    for fold in folds:
        title, prefix = fold.title(), fold.prefix()
        rows = [
            _row(plan, layer, row, paths, prefix)
            for layer, row, paths in _rows_of(fold)
        ]
        if not title and groups and not groups[-1][0]:
            groups[-1][1].extend(rows)
        elif rows:
            groups.append((title, rows))
    return groups


def _rows_of(fold):
    """Yields a layer, one of its rows, and the paths that it stands for."""
    for position, layer in enumerate(fold.sample):
        for index, row in enumerate(layer.rows):
            paths = [m[position].rows[index].path for m in fold.members]
            yield layer, row, paths


def _row(plan, layer, row, paths, prefix):
    mark = "whole"
    if layer.is_split(row):
        mark = _MARKS.get(layer.mark, "column")
    obstacles = [
        f"Dim {dim} of size {size}: {text}."
        for dim, (size, text) in enumerate(zip(row.shape, row.obstacles))
        if text
    ]
    times = f", {format_bytes(plan.device_bytes(row) * len(paths))} of all"
    return variables.Row(
        name=folding.below(row.path, prefix) if prefix else folding.span(paths),
        paths=paths,
        mark=mark,
        shape=row.shape,
        axes=row.axes,
        blocks=row.blocks,
        held=plan.device_bytes(row),
        numbers="",
        why=row.why,
        details=[
            f"{format_bytes(plan.device_bytes(row))} of "
            f"{format_bytes(row.nbytes)} on each device"
            f"{times * (len(paths) > 1)}; {row.dtype}"
            f"{'' if row.trainable else ', not trainable'}.",
            *obstacles,
        ],
    )
