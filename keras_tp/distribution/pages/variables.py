"""The variables of a plan or a report as rows that unfold."""

import collections
import html

from keras_tp.distribution.pages import charts
from keras_tp.distribution.pages import template
from keras_tp.distribution.planning import planner
from keras_tp.distribution.tensor_layout import axis_names
from keras_tp.distribution.tensor_layout import format_bytes

# Of the paths that a row stands for, those that it lists.
_MOST_PATHS = 100


class Row(
    collections.namedtuple(
        "Row", "name paths mark shape axes blocks held numbers why details"
    )
):
    """A variable, or the variables of repeated layers.

    Args:
        name: String.
        paths: List of strings.
        mark: String, as `charts.split_icon` takes it.
        shape: Tuple of ints.
        axes: Tuple with the mesh axes of each dim, or `None`.
        blocks: Int, number of blocks in the split dim.
        held: Int, bytes of one of them on one device.
        numbers: String, in the place of the bytes. Empty for the bytes.
        why: String.
        details: List of strings, sentences that are shown when it unfolds.
    """


def section(groups, parts=4):
    """Returns the rows of all groups, and a box to search them.

    Args:
        groups: List of `(title, rows)` with a list of `Row`.
        parts: Int, number of devices that split a dim. Defaults to 4.
    """
    body = [
        "<div class='search'><input id='ktp-search' type='search' "
        "aria-label='Search' placeholder='Search: name, shape or reason'>"
        "<span class='faint tip'><kbd>/</kbd> search <kbd>j</kbd> <kbd>k</kbd> "
        "next, previous <kbd>Enter</kbd> unfold <kbd>t</kbd> theme</span>"
        "<span class='faint' id='ktp-count' role='status'></span></div>"
    ]
    for index, (title, rows) in enumerate(groups):
        lines = "".join(_row(row, parts) for row in rows)
        head = f"<h3 class='mono'>{template.path(title)}</h3>" if title else ""
        if index and not title:
            # They do not belong to the repeated layers above them.
            head = "<h3>Other variables</h3>"
        body.append(f"<div class='group'>{head}{lines}</div>")
    return template.card("Variables", *body)


def _row(row, parts):
    icon = charts.split_icon(
        row.mark, 28, 20, 1, 1, blocks=row.blocks, parts=parts
    )
    number = row.numbers or format_bytes(row.held)
    searched = " ".join([*row.paths[:1], str(row.shape), row.why]).lower()
    listed = "".join(
        f"<li><code>{template.path(path)}</code></li>"
        for path in row.paths[:_MOST_PATHS]
    )
    left = len(row.paths) - _MOST_PATHS
    listed += f"<li>and {left} more</li>" * (left > 0)
    details = "".join(
        f"<p>{template.marked(text)}</p>" for text in (row.why, *row.details)
    )
    why = html.escape(row.why)
    return (
        f"<details class='row' data-text='{html.escape(searched)}'><summary>"
        f"<svg width='30' height='22' aria-hidden='true'>{icon}</svg>"
        f"<span class='mono'>{template.path(row.name)}</span>"
        f"<span class='dims'>{_dims(row)}</span>"
        f"<span class='number'>{number}</span>"
        f"<span class='why'>{why}</span></summary>"
        f"<div class='more'>{details}<ul>{listed}</ul></div></details>"
    )


def _dims(row):
    found = []
    axes = row.axes or [None] * len(row.shape)
    for size, axis in zip(row.shape, axes):
        if axis is None:
            found.append(f"<span class='dim'>{size}</span>")
            continue
        names = axis_names(axis)
        kind = "split" if row.blocks == 1 else "blocks"
        if set(names) <= set(planner.BATCH_AXES):
            kind = "batch"
        names = ", ".join(names)
        blocks = f", {row.blocks} blocks" * (row.blocks > 1)
        found.append(
            f"<span class='dim {kind}'>{size} {html.escape(names)}{blocks}"
            "</span>"
        )
    return " ".join(found) or "<span class='dim'>scalar</span>"
