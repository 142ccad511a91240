import sys
import types

import pytest

from keras_tp.distribution.pages import pictures


def test_svg(tmp_path):
    pictures.write(tmp_path / "a.svg", "<svg/>")
    assert (tmp_path / "a.svg").read_text() == "<svg/>"


def test_a_png_is_drawn_by_a_package(tmp_path, monkeypatch):
    def svg2png(bytestring, **kwargs):
        return b"png of " + bytestring

    package = types.SimpleNamespace(svg2png=svg2png)
    monkeypatch.setitem(sys.modules, "cairosvg", package)
    pictures.write(tmp_path / "a.png", "<svg/>")
    assert (tmp_path / "a.png").read_bytes() == b"png of <svg/>"


def test_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "cairosvg", None)
    with pytest.raises(ImportError, match="pip install cairosvg"):
        pictures.write(tmp_path / "a.png", "<svg/>")
    assert not list(tmp_path.iterdir())


def test_other_files(tmp_path):
    with pytest.raises(ValueError, match="ends in `.svg` or `.png`"):
        pictures.write(tmp_path / "a.pdf", "<svg/>")
