"""Draws the rows of `scaling.py` as SVG: efficiency against devices."""

import html
import math

WIDTH, HEIGHT, MARGIN, GAP = 250, 200, 44, 52
COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd")


def draw(rows):
    """Returns an SVG with a panel for each model and a line for each way.

    A solid line is the efficiency with the data axis hidden, a dashed one that
    with nothing hidden.

    Args:
        rows: List of rows of `scaling.py`, of one size of the model axis.
    """
    models = list(dict.fromkeys(row["model"] for row in rows))
    ways = _ways_that_differ(rows)
    counts = sorted({row["devices"] for row in rows})
    width = MARGIN + len(models) * (WIDTH + GAP)
    height = HEIGHT + MARGIN + 36 + 16 * len(ways)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" '
        f'height="{height}" font-family="sans-serif" font-size="11">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    for index, model in enumerate(models):
        parts += _panel(
            MARGIN + index * (WIDTH + GAP),
            [row for row in rows if row["model"] == model],
            ways,
            counts,
        )
    for index, names in enumerate(ways.values()):
        y = HEIGHT + MARGIN + 30 + 16 * index
        parts.append(_line([(MARGIN, y - 4), (MARGIN + 24, y - 4)], index))
        parts.append(_text(MARGIN + 30, y, "; ".join(names)))
    note = "solid: data axis hidden behind computations; dashed: nothing hidden"
    parts.append(_text(MARGIN + 330, HEIGHT + MARGIN + 30, note))
    return "\n".join([*parts, "</svg>"]) + "\n"


def _ways_that_differ(rows):
    """Returns a dict of way to all ways that have the same lines."""
    lines = {}
    for row in rows:
        point = row["efficiency"], row["efficiency_hidden"]
        lines.setdefault(row["way"], []).append(
            tuple(round(share, 3) for share in point)
        )
    found = {}
    for way, line in lines.items():
        first = next((w for w in found if lines[w] == line), way)
        found.setdefault(first, []).append(way)
    return found


def _panel(left, rows, ways, counts):
    low, high = (math.log2(counts[i]) for i in (0, -1))

    def x(count):
        return left + WIDTH * (math.log2(count) - low) / max(high - low, 1)

    def y(share):
        return 24 + HEIGHT * (1 - share)

    parts = [_text(left + WIDTH / 2, 16, rows[0]["model"], "middle")]
    for share in (0, 0.25, 0.5, 0.75, 1):
        parts.append(
            f'<path d="M{left} {y(share):.1f}h{WIDTH}" stroke="#ddd"/>'
        )
        parts.append(_text(left - 4, y(share) + 4, f"{share:.0%}", "end"))
    for count in counts[::3]:
        parts.append(_text(x(count), HEIGHT + 40, count, "middle"))
    parts.append(_text(left + WIDTH / 2, HEIGHT + 54, "devices", "middle"))
    for index, way in enumerate(ways):
        own = [row for row in rows if row["way"] == way]
        for name, dash in ("efficiency", "4 3"), ("efficiency_hidden", None):
            points = [(x(row["devices"]), y(row[name])) for row in own]
            parts.append(_line(points, index, dash))
    return parts


def _line(points, index, dash=None):
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    dashed = f' stroke-dasharray="{dash}"' if dash else ""
    return (
        f'<polyline points="{path}" fill="none" stroke-width="1.6" '
        f'stroke="{COLOURS[index % len(COLOURS)]}"{dashed}/>'
    )


def _text(x, y, text, anchor="start"):
    return (
        f'<text x="{x:.0f}" y="{y:.0f}" text-anchor="{anchor}">'
        f"{html.escape(str(text))}</text>"
    )
