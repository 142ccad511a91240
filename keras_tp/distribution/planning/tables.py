"""Tables for a terminal."""

import io
import re
import shutil

FOLD = {"overflow": "fold"}
RIGHT = {"justify": "right"}

# Where the output is no terminal.
_WIDTH = 120
_LEAST_WIDTH = 80
# Tables with more rows show repeated layers once.
LONG = 100
_NUMBER = re.compile(r"\d+")


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
    width = shutil.get_terminal_size((_WIDTH, 24)).columns
    console = Console(file=text, width=max(width, _LEAST_WIDTH))
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


def repeats_joined(rows):
    """Joins the rows of repeated layers, if a table is long.

    Rows are alike if only the numbers in their first cell, a path, differ. The
    first of them stands for all, with a range in the place of each number that
    varies, and how many they are.

    Args:
        rows: List of tuples of strings; a path is first.

    Returns:
        The rows, and a sentence about them: empty if none was joined.
    """
    if len(rows) <= LONG:
        return rows, ""
    alike = {}
    for path, *others in rows:
        key = _NUMBER.sub("#", path), *others
        alike.setdefault(key, []).append(path)
    joined = [
        (_with_ranges(paths), *others) for (_, *others), paths in alike.items()
    ]
    if len(joined) == len(rows):
        return rows, ""
    return joined, (
        "A row that begins with a number, such as `12 x`, stands for as many "
        "variables; sizes are those of one."
    )


def _with_ranges(paths):
    if len(paths) == 1:
        return paths[0]
    columns = zip(*(map(int, _NUMBER.findall(path)) for path in paths))
    texts = [
        str(min(column))
        if min(column) == max(column)
        else f"[{min(column)}-{max(column)}]"
        for column in map(set, columns)
    ]
    path = _NUMBER.sub(lambda found: texts.pop(0), paths[0])
    return f"{len(paths)} x {path}"
