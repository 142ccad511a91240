"""Makes pictures of reports as they look in a terminal."""

import contextlib
import io
import os

from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

WIDTHS = (80, 120)
NAMES = tuple(
    f"terminal_{name}_{width}"
    for name in ("plan", "describe", "compile_for")
    for width in WIDTHS
)
# Bytes.
MOST = 60_000
# That of rich, without its font, which a browser would fetch.
_FORMAT = """\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}">
<style>
.{unique_id}-matrix {{
    font-family: "DejaVu Sans Mono", Menlo, Consolas, monospace;
    font-size: {char_height}px;
    line-height: {line_height}px;
}}
{styles}
</style>
<defs>
{lines}
</defs>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})">
{backgrounds}
<g class="{unique_id}-matrix">
{matrix}
</g>
</g>
</svg>
"""


def make(folder, plan, describe, compile_for):
    """Writes a picture of each report in terminals of two widths.

    Args:
        folder: `pathlib.Path`.
        plan: `ShardingPlan`.
        describe: `ShardingReport`.
        compile_for: `CompileReport`.
    """
    texts = {
        "plan": ("print(plan.summary())", plan.summary),
        "describe": ("print(describe(model))", describe.__str__),
        "compile_for": ("print(compile_for(...))", compile_for.__str__),
    }
    for width in WIDTHS:
        for name, (command, text_of) in texts.items():
            with _columns(width):
                text = text_of()
            path = folder / f"terminal_{name}_{width}.svg"
            path.write_text(_picture(f">>> {command}\n{text}", width))


@contextlib.contextmanager
def _columns(width):
    """Gives the terminal a width."""
    kept = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = str(width)
    try:
        yield
    finally:
        del os.environ["COLUMNS"]
        if kept is not None:
            os.environ["COLUMNS"] = kept


def _picture(text, width):
    console = Console(record=True, width=width, file=io.StringIO())
    console.print(Text(text))
    return console.export_svg(
        title="",
        theme=MONOKAI,
        code_format=_FORMAT,
        unique_id="terminal",
    )
