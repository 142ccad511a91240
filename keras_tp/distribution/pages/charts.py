"""Bars as SVG. Widths are shares, so that they fit a screen of any width."""

import html

from keras_tp.distribution.tensor_layout import format_bytes

NAMES = {
    "parameters": "weights",
    "gradients": "gradients",
    "slots": "optimizer slots",
    "activations": "activations",
    "gathered": "gathered weights",
    "all_reduce": "all-reduce",
    "all_gather": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "all_to_all": "all-to-all",
    "collective_permute": "collective-permute",
    "arguments": "arguments",
    "temporaries": "outputs and temporaries",
    "computations": "computations",
    "waiting": "communication that they do not hide",
    "weight": "weights",
    "slot": "optimizer slots",
    "other": "metrics and random state",
}


def bar(parts, whole, height=14, limit=None, label=""):
    """Returns a stack of parts side by side, as an SVG element.

    Args:
        parts: Dict of the name of a part to its size; the name is the end of
            a class, `fill-NAME`.
        whole: Number, the size that fills the width.
        height: Int, pixels. Defaults to 14.
        limit: Number, a size to mark with a line. Defaults to `None`.
        label: String, a description for a reader of the screen.
    """
    whole, x, inside = whole or 1, 0, []
    for name, size in parts.items():
        width = 100 * size / whole
        inside.append(
            f"<rect class='fill-{name}' data-part='{name}' x='{x:.3f}%' y='0' "
            f"width='{width:.3f}%' height='{height}'>"
            f"<title>{html.escape(NAMES.get(name, name))}</title></rect>"
        )
        x += width
    at = 0 if limit is None else 100 * limit / whole
    hidden = " visibility='hidden'" if limit is None else ""
    inside.append(
        f"<line class='limit' x1='{at:.3f}%' x2='{at:.3f}%' y1='0' "
        f"y2='{height}'{hidden}/>"
    )
    return (
        f"<svg class='bar' role='img' aria-label='{html.escape(label)}' "
        f"width='100%' height='{height}'>{''.join(inside)}</svg>"
    )


def legend(parts, text_of=format_bytes):
    """Returns the parts of a bar with their colours and sizes, as a list.

    Args:
        parts: Dict, as `bar` takes it.
        text_of: Function that returns the text of a size, or `None` to leave
            sizes out. Defaults to bytes.
    """
    items = []
    for name, size in parts.items():
        value = ""
        if text_of is not None:
            value = f" <b data-value='{name}'>{text_of(size)}</b>"
        items.append(
            f"<li data-part='{name}'><i class='dot back-{name}'></i>"
            f"{html.escape(NAMES.get(name, name))}{value}</li>"
        )
    return f"<ul class='legend'>{''.join(items)}</ul>"


def split_icon(mark, width=30, height=22, x=0, y=0, blocks=1, parts=4):
    """Returns a matrix with its parts in colours, as SVG.

    Args:
        mark: String: `"column"` splits it along its outputs, `"row"` along its
            inputs; others leave it whole.
        width: Int, pixels. Defaults to 30.
        height: Int, pixels. Defaults to 22.
        x: Number, where it begins. Defaults to 0.
        y: Number, where it begins. Defaults to 0.
        blocks: Int, number of blocks of which each is split. Defaults to 1.
        parts: Int, number of devices to show, 4 at most. Defaults to 4.
    """
    kind = "frame" if mark in ("column", "row") else "frame solid"
    frame = (
        f"<rect class='{kind}' x='{x}' y='{y}' width='{width}' "
        f"height='{height}' rx='2'/>"
    )
    if mark not in ("column", "row"):
        return frame
    count = max(min(parts, 4), 1) * (blocks if blocks <= 4 else 1)
    stripes = []
    for index in range(count):
        device = index % max(min(parts, 4), 1)
        if mark == "column":
            step = width / count
            box = x + index * step, y, step, height
        else:
            step = height / count
            box = x, y + index * step, width, step
        left, top, wide, high = (f"{number:.4g}" for number in box)
        stripes.append(
            f"<rect class='fill-d{device}' x='{left}' y='{top}' "
            f"width='{wide}' height='{high}'/>"
        )
    return "".join(stripes) + frame
