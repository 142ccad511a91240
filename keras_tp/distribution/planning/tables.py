"""Tables for a terminal."""

import io

FOLD = {"overflow": "fold"}
RIGHT = {"justify": "right"}


def text_of(*parts):
    """Returns tables and lines as one text, 120 columns wide.

    Args:
        *parts: Strings, and tables: `(title, columns, rows)`. `columns` is a
            dict of heading to `FOLD` or `RIGHT`; a row is a list of strings.
    """
    # Imported late: only a printed report needs it.
    from rich.console import Console
    from rich.table import Table

    text = io.StringIO()
    console = Console(file=text, width=120)
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
