"""The colours of pages and pictures, light and dark."""

import re

# Name -> its colour on a light and on a dark page. The colours of devices
# differ for most people who see some colours alike.
_COLOURS = {
    "ink": ("#1a2230", "#e6eaf2"),
    "soft": ("#5b6678", "#98a3b8"),
    "line": ("#dfe3ea", "#2b3342"),
    "card": ("#ffffff", "#171c26"),
    "back": ("#f5f6f9", "#0e1219"),
    "frame": ("#98a2b3", "#5d6a80"),
    "whole": ("#e9edf3", "#262e3c"),
    "accent": ("#2f6fde", "#3a72d8"),
    "d0": ("#2f6fde", "#5b93f7"),
    "d1": ("#e8912d", "#f0a44b"),
    "d2": ("#14a08b", "#2fc0a8"),
    "d3": ("#b04fa3", "#d07bc4"),
    "parameters": ("#2f6fde", "#5b93f7"),
    "gradients": ("#14a08b", "#2fc0a8"),
    "slots": ("#8a63d2", "#a98bea"),
    "activations": ("#e8912d", "#f0a44b"),
    "gathered": ("#b04fa3", "#d07bc4"),
    "weight": ("#2f6fde", "#5b93f7"),
    "slot": ("#8a63d2", "#a98bea"),
    "other": ("#98a2b3", "#5d6a80"),
    "arguments": ("#2f6fde", "#5b93f7"),
    "temporaries": ("#e8912d", "#f0a44b"),
    "computations": ("#2f6fde", "#5b93f7"),
    "waiting": ("#d1495b", "#f07484"),
    "all_reduce": ("#d1495b", "#f07484"),
    "all_gather": ("#e8912d", "#f0a44b"),
    "reduce_scatter": ("#8a63d2", "#a98bea"),
    "all_to_all": ("#14a08b", "#2fc0a8"),
    "collective_permute": ("#98a2b3", "#5d6a80"),
    "problem": ("#b42336", "#ff8b9a"),
    "problem-back": ("#fdeef0", "#341a20"),
    "good": ("#0d7a5f", "#58d3ae"),
    "good-back": ("#e9f7f2", "#12291f"),
    "note": ("#8a5a00", "#f2c063"),
    "note-back": ("#fdf5e3", "#2e2512"),
}
_LIGHT, _DARK = (
    {name: pair[index] for name, pair in _COLOURS.items()} for index in (0, 1)
)
# Notebooks have a theme of their own.
_OF_NOTEBOOK = "[data-jp-theme-light='{}'] .ktp"


def style():
    """Returns the style sheet that defines the colours of a page.

    A dark system has a dark page, unless the attribute `data-theme` of the
    page, or the theme of a notebook, says otherwise.
    """
    fills = "".join(
        f".ktp .fill-{name} {{ fill: var(--{name}); }}\n"
        f".ktp .back-{name} {{ background: var(--{name}); }}\n"
        for name in _COLOURS
    )
    by_system = _rule(".ktp:not([data-theme='light'])", _DARK)
    return (
        _rule(".ktp", _LIGHT)
        + f"@media (prefers-color-scheme: dark) {{\n{by_system}}}\n"
        + _rule(".ktp[data-theme='dark']", _DARK)
        + _rule(_OF_NOTEBOOK.format("false"), _DARK)
        + _rule(_OF_NOTEBOOK.format("true"), _LIGHT)
        + fills
    )


def on_paper(style_sheet):
    """Returns a style sheet for a picture, in which colours have no names.

    Programs for documents do not know CSS variables.

    Args:
        style_sheet: String.
    """
    fills = "".join(f".fill-{k} {{ fill: {v}; }}\n" for k, v in _LIGHT.items())
    named = re.sub(
        r"var\(--([\w-]+)\)", lambda found: _LIGHT[found[1]], style_sheet
    )
    return fills + named


def _rule(selector, colours):
    values = " ".join(f"--{name}: {value};" for name, value in colours.items())
    return f"{selector} {{ {values} }}\n"
