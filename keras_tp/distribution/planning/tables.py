"""Tables for a terminal."""

import io
import shutil
import textwrap

FOLD = {"overflow": "fold"}
RIGHT = {"justify": "right"}

# Where the output is no terminal.
_WIDTH = 120
_LEAST_WIDTH = 80
# Between columns, and in front of the rows of a group.
_GAP, _INDENT = "  ", "  "
# The least width of a column of notes.
_NOTE = 34


def terminal_width():
    """Returns the width of a table, in characters."""
    width = shutil.get_terminal_size((_WIDTH, 24)).columns
    return max(width, _LEAST_WIDTH)


def text_of(*parts):
    """Returns tables and lines as one text, as wide as the terminal.

    Args:
        *parts: Strings, and tables: `(title, columns, rows)`. `columns` is a
            dict of heading to `FOLD` or `RIGHT`; a row is a list of strings.
    """
    # Imported late: only a printed report needs it.
    from rich.console import Console
    from rich.table import Table

    text = io.StringIO()
    console = Console(file=text, width=terminal_width())
    for part in parts:
        if not isinstance(part, str):
            title, columns, rows = part
            part = Table(title=title)
            for heading, options in columns.items():
                part.add_column(heading, **options)
            for row in rows:
                part.add_row(*row)
        console.print(part)
    return text.getvalue().rstrip()


def listing(title, columns, groups, *lines):
    """Returns a table of variables in groups, as wide as the terminal.

    The last column has notes. They stand below their rows where the terminal
    has no room for them beside. So does all but the name, if need be.

    Args:
        title: String.
        columns: Dict of heading to `FOLD` or `RIGHT`.
        groups: List of `(heading, rows)`; the rows of a heading are indented,
            an empty heading has no line. A row is a list of strings.
        *lines: Strings, below the table.
    """
    width = terminal_width()
    rows = [
        (_INDENT * bool(heading) + row[0], *row[1:])
        for heading, found in groups
        for row in found
    ]
    headings = list(columns)
    cells = [row[1:-1] for row in rows]
    sizes = [
        max([len(heading), *(len(row[i]) for row in cells)])
        for i, heading in enumerate(headings[1:-1])
    ]
    # Of all columns but the first and the last.
    inner = sum(len(_GAP) + size for size in sizes)
    names = max([len(headings[0]), *(len(row[0]) for row in rows)])
    names = min(names, max(width - inner, len(_INDENT) * 2))
    left = width - names - inner - len(_GAP)
    longest = max((len(row[-1]) for row in rows), default=0)
    is_beside = left >= min(longest, _NOTE)
    options = list(columns.values())[1:-1]

    def line_of(name, cells, note=""):
        texts = [
            cell.rjust(size) if option is RIGHT else cell.ljust(size)
            for cell, size, option in zip(cells, sizes, options)
        ]
        return _GAP.join([name.ljust(names), *texts, note]).rstrip()

    shown = [*textwrap.wrap(title, width), ""]
    head = headings[-1] if is_beside else ""
    shown += [line_of(headings[0], headings[1:-1], head), "-" * width]
    for heading, found in groups:
        shown += textwrap.wrap(heading, width) if heading else []
        for name, *cells, note in found:
            name = _INDENT * bool(heading) + name
            if len(name) > names:
                shown += [name, line_of("", cells)]
            else:
                shown.append(line_of(name, cells))
            if is_beside and note:
                first, *more = textwrap.wrap(note, left)
                at = width - left
                shown[-1] = shown[-1].ljust(at) + first
                shown += [" " * at + text for text in more]
            elif note:
                shown += textwrap.wrap(
                    note,
                    width,
                    initial_indent=" " * 6,
                    subsequent_indent=" " * 6,
                )
    shown.append("-" * width)
    for text in lines:
        shown += textwrap.wrap(text, width)
    return "\n".join(shown)
