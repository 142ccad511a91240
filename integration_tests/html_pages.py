"""Checks of an HTML page that need no browser."""

import html.parser
import re

# Elements without an end.
_EMPTY = {"meta", "input", "wbr", "br", "link", "img"}
# In SVG, elements that close themselves.
_SHAPES = {"rect", "line", "circle", "path"}


class Page(html.parser.HTMLParser):
    """Reads a page, or a piece of one, and fails if it is not well-formed.

    Args:
        text: String.

    Attributes:
        text: String, what a reader sees, with single spaces.
        classes: List of the classes of all elements.
        attributes: List of `(tag, dict of attributes)`.
    """

    def __init__(self, text):
        super().__init__()
        self._open, self._texts = [], []
        self.classes, self.attributes = [], []
        self.feed(text)
        assert not self._open, self._open
        self.text = " ".join(" ".join(self._texts).split())

    def handle_starttag(self, tag, attrs):
        found = dict(attrs)
        self.attributes.append((tag, found))
        self.classes += (found.get("class") or "").split()
        # The page needs no network.
        assert tag not in ("link", "img", "iframe")
        assert not {"src", "href", "onclick"} & set(found)
        if tag not in _EMPTY:
            self._open.append(tag)

    def handle_startendtag(self, tag, attrs):
        assert tag in _SHAPES, tag
        self.handle_starttag(tag, attrs)
        self._open.pop()

    def handle_endtag(self, tag):
        assert self._open.pop() == tag

    def handle_data(self, data):
        if not {"script", "style"} & set(self._open):
            self._texts.append(data)
        else:
            assert not re.search(r"https?://|@import|url\(", data)
