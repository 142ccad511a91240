"""Settings of the documentation site; `shell/docs.sh` builds it.

The source folder is the repository, not this folder, so that links between
pages are the same on the site and in the repository.
"""

import inspect
import re
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

import keras_tp  # noqa: E402

project = "keras_tp"
version = release = keras_tp.__version__
copyright = "the authors of keras_tp, MIT license"

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
root_doc = "docs/index"
include_patterns = [
    "docs/**",
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "benchmarks/*.md",
    "examples/**.md",
    "integration_tests/README.md",
]
exclude_patterns = ["docs/_build", "docs/start_page"]

myst_heading_anchors = 4

html_theme = "furo"
html_title = f"keras_tp {version}"
# The first page is docs/index.html; the top folder leads to it.
html_extra_path = ["start_page"]

# The docstrings are Markdown in Keras's style: `name` in single backticks,
# code between fences, and sections that napoleon knows.
autodoc_member_order = "bysource"
autodoc_typehints = "none"
napoleon_numpy_docstring = False
napoleon_use_rtype = False
default_role = "code"

# Names that the API reference documents: in backticks they become links.
PAGES = sorted((ROOT / "docs" / "api").glob("*.md"))
DOCUMENTED = {
    name.rpartition(".")[2]: name
    for page in PAGES
    for name in re.findall(
        r"auto(?:class|function|exception):: ([\w.]+)", page.read_text()
    )
}


def fence_to_block(indent, language, code):
    """Returns a Markdown fence as a code block of Sphinx."""
    head = f"{indent}.. code-block:: {language or 'text'}"
    lines = [f"   {line}" if line else "" for line in code.split("\n")]
    return "\n".join([head, "", *lines])


def span_to_role(match):
    """Returns a code span as a link to what it names, or else as code."""
    text = re.sub(r"\s*\n\s*", " ", match[1])
    target = DOCUMENTED.get(text.removesuffix("()"))
    role = f":py:obj:`{text} <{target}>`" if target else f"``{text}``"
    # In reStructuredText, a letter may follow only after an escaped space.
    is_plural = match.string[match.end() : match.end() + 1].isalpha()
    return role + "\\ " * is_plural


def returns_to_field(match):
    """Returns a section "Returns" as a field.

    Napoleon takes all in front of a colon for a type.
    """
    text = textwrap.dedent(match[1]).strip("\n")
    return ":returns: " + text.replace("\n", "\n    ") + "\n\n"


def process_docstring(app, what, name, obj, options, lines):
    """Turns the Markdown of a docstring into reStructuredText, in place."""
    text = "\n".join(lines) + "\n"
    parts = re.split(r"(?ms)^(\s*)```(\w*)\n(.*?)\n\s*```$", text)
    # Four by four: text, and the three groups of a fence.
    done = []
    for k, part in enumerate(parts):
        if k % 4 == 0:
            part = re.sub(r"`([^`]+)`", span_to_role, part)
            part = re.sub(
                r"(?m)^Returns:\n((?:(?: {4}.*)?\n)+)", returns_to_field, part
            )
            done.append(part)
        elif k % 4 == 3:
            done.append(fence_to_block(*parts[k - 2 : k + 1]))
    lines[:] = "".join(done).split("\n")


def skip_member(app, what, name, obj, skip, options):
    """Leaves out members without a docstring of their own."""
    return skip or not inspect.getdoc(obj)


def setup(app):
    """Registers the handlers; priority 400 is before napoleon's."""
    app.connect("autodoc-process-docstring", process_docstring, priority=400)
    app.connect("autodoc-skip-member", skip_member)
