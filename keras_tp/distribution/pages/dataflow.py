"""The layers of a plan as one picture: splits, and sums over the devices."""

import html

from keras_tp.distribution.pages import charts
from keras_tp.distribution.pages import plan_layers
from keras_tp.distribution.planning import folding
from keras_tp.distribution.tensor_layout import axis_size
from keras_tp.distribution.tensor_layout import format_bytes

WIDTH = 440
# Of a layer, of the name of a block, and between blocks.
_ROW, _HEAD, _GAP = 46, 26, 12
_WIRE = 44
_SPREAD = 7
# The states of an activation.
_WHOLE, _SPLIT, _ALONG = "whole", "split", "along"
_MOST_LETTERS = 42


def picture(plan, folds):
    """Returns the dataflow of a plan as the inside of an SVG, and its height.

    A thick line is an activation that each device has whole. Thin lines in the
    colours of the devices are its parts.

    Args:
        plan: `ShardingPlan`.
        folds: List of `Fold`.
    """
    return _Drawing(plan).draw(folds)


def svg(plan, folds):
    """Returns the dataflow of a plan as an SVG element of a page."""
    inside, height = picture(plan, folds)
    name = html.escape(f"Dataflow of {plan.model_name}")
    return (
        f"<svg class='flow' role='img' aria-label='{name}' "
        f"viewBox='0 0 {WIDTH} {height}'>{inside}</svg>"
    )


class _Drawing:
    """Draws from top to bottom.

    Args:
        plan: `ShardingPlan`.
    """

    def __init__(self, plan):
        self._plan = plan
        self._count = axis_size(plan.device_mesh, plan.axis)
        self._shown = max(min(self._count, 4), 1)
        self._y = 8
        self._state = _WHOLE
        self._parts = []

    def draw(self, folds):
        """Returns the elements, and the height."""
        self._terminal("inputs")
        unused = []
        for fold in folds:
            if all(layer.mark == plan_layers.UNUSED for layer in fold.sample):
                unused.append(fold)
            else:
                self._fold(fold)
        self._wire(_GAP)
        is_split = self._state != _WHOLE
        self._terminal("outputs, split" if is_split else "outputs")
        if unused:
            self._y += _GAP
            self._text(16, self._y + 14, "not in the forward pass", "detail")
            self._y += _HEAD
            for fold in unused:
                for layer in fold.sample:
                    self._describe(layer, "")
                    self._y += _ROW
        return "".join(self._parts), self._y + 6

    def _fold(self, fold):
        self._wire(_GAP)
        prefix, top, mark = fold.prefix(), self._y, len(self._parts)
        if fold.title():
            self._wire(_HEAD)
            self._text(84, top + 18, _short(fold.title()), "block")
        for layer in fold.sample:
            self._layer(layer, prefix)
        if fold.title():
            self._wire(4)
            frame = (
                f"<rect class='around' x='6' y='{top}' width='{WIDTH - 12}' "
                f"height='{self._y - top}' rx='8'/>"
            )
            self._parts.insert(mark, frame)

    def _layer(self, layer, prefix):
        forward = [row for row in layer.sums if not row.backward]
        backward = [row for row in layer.sums if row.backward]
        if not layer.rows:
            # An operation between layers.
            self._wire(_GAP)
            self._text(84, self._y + 15, _short(layer.path), "name")
            if forward:
                self._join(forward)
            if backward:
                self._backward(backward)
            self._wire(_GAP)
            return
        top = self._y
        if layer.mark == plan_layers.COLUMN and self._state != _SPLIT:
            self._wire(6)
            self._fork(backward, self._state == _ALONG)
            self._state = _SPLIT
        elif backward:
            self._wire(6)
            self._backward(backward)
        if layer.mark == plan_layers.ROW and self._state != _SPLIT:
            # A lookup, or a product whose input each device has whole.
            self._fork([], False)
            self._state = _SPLIT
        self._wire(max(top + _ROW - self._y, 6))
        end, self._y = self._y, top
        self._describe(layer, prefix)
        self._y = end
        if forward:
            self._join(forward)
        if layer.gathers:
            self._merge()
            self._node("&#8746;", "gather", "The output is gathered.")
            self._state = _WHOLE

    def _describe(self, layer, prefix):
        """Draws the matrix of a layer, its name, shape and bytes."""
        main, y = layer.main, self._y
        mark = layer.mark
        if mark == plan_layers.WHOLE and layer.is_split(main):
            # A vector beside activations that are split.
            mark = plan_layers.COLUMN
        self._parts.append(
            charts.split_icon(
                *(mark, 34, 26, 84, y + 10),
                blocks=main.blocks,
                parts=self._shown,
            )
        )
        # Of a layer that is used, there may be variables that are not.
        is_unused = layer.mark == plan_layers.UNUSED
        name = main.path if is_unused else folding.below(layer.path, prefix)
        held = sum(self._plan.device_bytes(row) for row in layer.rows)
        kind = "split" if layer.is_split(main) else "whole"
        if layer.mark in (plan_layers.COLUMN, plan_layers.ROW):
            kind = layer.mark
        shape = " x ".join(map(str, main.shape)) or "scalar"
        self._text(
            130,
            y + 20,
            _short(name or self._plan.model_name, 38),
            "name",
            main.why,
        )
        self._text(
            130, y + 36, f"{shape}, {kind}, {format_bytes(held)}", "detail"
        )

    # -- wires ---------------------------------------------------------------

    def _wire(self, height):
        """Draws the activation downwards, in its state."""
        y, end = self._y, self._y + height
        if self._state == _SPLIT:
            for index, x in self._strands():
                self._line(x, y, x, end, f"wire-d{index}")
        elif self._state == _ALONG:
            for index, x in self._strands():
                self._line(x, y, x, end, f"wire-d{index} dashed")
        else:
            self._line(_WIRE, y, _WIRE, end, "wire")
        self._y = end

    def _strands(self):
        first = _WIRE - _SPREAD * (self._shown - 1) / 2
        return [(k, first + k * _SPREAD) for k in range(self._shown)]

    def _fork(self, backward, gathers):
        if gathers:
            self._node("&#8746;", "gather", "Gathered along the sequence.")
        if backward:
            self._backward(backward)
        y = self._y
        for index, x in self._strands():
            self._parts.append(
                f"<path class='wire-d{index}' d='M{_WIRE} {y} C{_WIRE} "
                f"{y + 8} {x} {y + 4} {x} {y + 12}'/>"
            )
        self._y += 12

    def _join(self, forward):
        self._merge()
        self._forward(forward)
        self._state = _ALONG if forward[0].scattered else _WHOLE

    def _merge(self):
        if self._state != _SPLIT:
            return
        y = self._y
        for index, x in self._strands():
            self._parts.append(
                f"<path class='wire-d{index}' d='M{x} {y} C{x} {y + 8} "
                f"{_WIRE} {y + 4} {_WIRE} {y + 12}'/>"
            )
        self._y += 10

    def _forward(self, rows):
        kind = "reduce-scatter" if rows[0].scattered else "all-reduce"
        title = f"Forward: {kind} of the output of {rows[0].operation}."
        self._node("&#931;", "sum", title)

    def _backward(self, rows):
        kind = "reduce-scatter" if rows[0].scattered else "all-reduce"
        title = f"Backward: {kind} of the gradient of its input."
        self._node("&#931;", "gradient", title)

    def _node(self, sign, kind, title):
        y = self._y + 10
        self._parts.append(
            f"<g class='node {kind}'><title>{html.escape(title)}</title>"
            f"<circle cx='{_WIRE}' cy='{y}' r='10'/><text x='{_WIRE}' "
            f"y='{y + 5}' text-anchor='middle'>{sign}</text></g>"
        )
        self._y += 20

    def _terminal(self, text):
        y = self._y
        self._parts.append(
            f"<circle class='end' cx='{_WIRE}' cy='{y + 6}' r='5'/>"
        )
        self._text(84, y + 10, text, "detail")
        self._y += 12

    def _line(self, x1, y1, x2, y2, kind):
        self._parts.append(
            f"<line class='{kind}' x1='{x1}' y1='{y1}' x2='{x2}' y2='{y2}'/>"
        )

    def _text(self, x, y, text, kind, title=""):
        title = f"<title>{html.escape(title)}</title>" if title else ""
        self._parts.append(
            f"<text class='{kind}' x='{x}' y='{y}'>{title}"
            f"{html.escape(text)}</text>"
        )


def legend(plan):
    """Returns what the signs of the picture mean, as HTML."""
    count = axis_size(plan.device_mesh, plan.axis)
    shown = f", {min(count, 4)} of {count} shown" if count > 4 else ""
    column, row, whole = (
        f"<svg width='26' height='18'>"
        f"{charts.split_icon(mark, 24, 16, 1, 1, parts=count)}</svg>"
        for mark in ("column", "row", "whole")
    )
    sign = "<svg width='20' height='20' viewBox='34 0 20 20'><g class='node"
    circle = (
        "'><circle cx='44' cy='10' r='9'/><text x='44' y='15' "
        "text-anchor='middle'>&#931;</text></g></svg>"
    )
    return (
        f"<ul class='legend signs'><li>{column}column: outputs split{shown}"
        f"</li><li>{row}row: inputs split</li><li>{whole}whole</li>"
        f"<li>{sign} sum{circle}sum, forward</li>"
        f"<li>{sign} gradient{circle}sum of gradients, backward</li></ul>"
    )


def _short(text, most=_MOST_LETTERS):
    """Returns a text with its middle left out, if it is long."""
    if len(text) <= most:
        return text
    half = (most - 3) // 2
    return f"{text[:half]}...{text[-half:]}"
