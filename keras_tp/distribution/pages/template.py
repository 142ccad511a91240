"""The frame of a page, of a piece of one in a notebook, and of a picture."""

import functools
import html
import importlib.resources
import json
import re

from keras_tp.distribution.pages import colours

_FONT = "font-family: Helvetica, Arial, 'DejaVu Sans', sans-serif;"


@functools.cache
def _file(name):
    files = importlib.resources.files("keras_tp.distribution.pages")
    return (files / name).read_text(encoding="utf-8")


@functools.cache
def _style():
    drawing = re.sub(r"(?m)^\.", ".ktp .", _file("drawing.css"))
    return colours.style() + _file("page.css") + drawing


def page(title, body, data=None):
    """Returns an HTML page in one file, with its style and its script.

    Args:
        title: String.
        body: List of strings, HTML.
        data: Dict, what the script computes with. Defaults to `None`.
    """
    # A name in the data must not end the element.
    text = json.dumps(data or {}).replace("<", "\\u003c")
    return (
        "<!doctype html>\n<html lang='en'><head><meta charset='utf-8'>"
        "<meta name='viewport' content='width=device-width, initial-scale=1'>"
        f"<title>{html.escape(title)}</title>\n<style>\n{_style()}</style>"
        "</head>\n<body class='ktp ktp-page'><main>\n"
        + "\n".join(body)
        + "\n</main>\n<script type='application/json' id='ktp-data'>"
        + f"{text}</script>\n<script>\n{_file('page.js')}</script>"
        + "</body></html>\n"
    )


def piece(title, line, body):
    """Returns HTML for a notebook, with its style and without a script.

    Args:
        title: String.
        line: String, what stands below.
        body: List of strings, HTML.
    """
    return (
        f"<div class='ktp ktp-piece'><style>\n{_style()}</style>\n"
        f"<p class='title'>{html.escape(title)}</p>"
        f"<p class='faint'>{html.escape(line)}</p>"
        + "\n".join(body)
        + "\n</div>"
    )


def picture(inside, width, height):
    """Returns a picture as the text of an SVG file.

    Args:
        inside: String, its elements.
        width: Number.
        height: Number.
    """
    style = colours.on_paper(f"text {{ {_FONT} }}\n{_file('drawing.css')}")
    return (
        "<?xml version='1.0' encoding='utf-8'?>\n"
        f"<svg xmlns='http://www.w3.org/2000/svg' width='{width}' "
        f"height='{height}' viewBox='0 0 {width} {height}'>\n"
        f"<style>\n{style}</style>\n{inside}\n</svg>\n"
    )


def marked(text):
    """Returns a text as HTML, with the names in backticks as code."""
    parts = html.escape(text).split("`")
    if len(parts) % 2 == 0:
        # A backtick without another one is a part of a name.
        return "`".join(parts)
    return "".join(
        f"<code>{part.replace('/', '/<wbr>')}</code>" if index % 2 else part
        for index, part in enumerate(parts)
    )


def path(text):
    """Returns a path as HTML that may be broken after a slash."""
    return html.escape(text).replace("/", "/<wbr>")


def top(title, line):
    """Returns the head of a page: its title, and the button of its theme."""
    return (
        f"<div class='top'><div><h1>{html.escape(title)}</h1>"
        f"<p class='faint'>{html.escape(line)}</p></div>"
        "<button id='ktp-theme' type='button' title='Light or dark: t' "
        "hidden>Dark</button></div>"
    )


def findings(found):
    """Returns `Finding`s as HTML; the first one is large."""
    lines = []
    for index, (level, text, detail) in enumerate(found):
        lead = " lead" * (index == 0)
        more = f"<p>{marked(detail)}</p>" if detail else ""
        lines.append(
            f"<div class='finding {level}{lead}'><p>{marked(text)}</p>{more}"
            "</div>"
        )
    return f"<div class='findings'>{''.join(lines)}</div>"


def card(title, *parts):
    """Returns a part of a page with a heading."""
    inside = "\n".join(parts)
    return (
        f"<section class='card'><h2>{html.escape(title)}</h2>{inside}</section>"
    )


def table(headings, rows):
    """Returns a table; all cells but the first are numbers.

    On a phone the cells of a row stand below each other, with their headings.
    """
    kind = " class='stacks'" if headings else ""
    lines = [f"<div class='wide'><table{kind}>"]
    if headings:
        cells = "".join(f"<th>{html.escape(cell)}</th>" for cell in headings)
        lines.append(f"<tr>{cells}</tr>")
    for first, *rest in rows:
        labels = [
            f" data-label='{html.escape(name)}'" for name in headings[1:]
        ] or [""] * len(rest)
        cells = "".join(
            f"<td class='number'{label}>{html.escape(cell)}</td>"
            for label, cell in zip(labels, rest)
        )
        lines.append(f"<tr><td>{html.escape(first)}</td>{cells}</tr>")
    return "\n".join([*lines, "</table></div>"])
