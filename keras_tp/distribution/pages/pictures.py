"""Writes pictures to files."""

import importlib
import os

from keras_tp.backend.saving import atomic_files

# Of a PNG, to be sharp in print.
_SCALE = 3


def write(path, svg):
    """Writes a picture to a file.

    Args:
        path: String or path-like. It ends in `.svg` or `.png`.
        svg: String, the text of an SVG file.

    Raises:
        ValueError: if the file has another ending.
        ImportError: if a PNG is asked for and `cairosvg` is not installed.
    """
    ending = os.path.splitext(path)[1].lower()
    if ending not in (".svg", ".png"):
        raise ValueError(
            "A picture is written to a file that ends in `.svg` or `.png`. "
            f"Received: path={str(path)!r}"
        )
    content = svg.encode()
    if ending == ".png":
        content = _cairosvg(path).svg2png(
            bytestring=content, scale=_SCALE, background_color="white"
        )
    with atomic_files.replaced(path) as new:
        with open(new, "wb") as file:
            file.write(content)


def _cairosvg(path):
    try:
        return importlib.import_module("cairosvg")
    except ImportError as e:
        raise ImportError(
            "A PNG is drawn by the package `cairosvg`: `pip install cairosvg`, "
            "or write an SVG file, which needs no package. Received: "
            f"path={str(path)!r}"
        ) from e
