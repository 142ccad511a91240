import re

from integration_tests import html_pages
from keras_tp.distribution.pages import colours
from keras_tp.distribution.pages import findings
from keras_tp.distribution.pages import template


def test_names_in_backticks_are_code():
    assert template.marked("`a/b` is <big>") == (
        "<code>a/<wbr>b</code> is &lt;big&gt;"
    )
    # A name with a backtick.
    assert template.marked("`a`b` is") == "`a`b` is"


def test_data_cannot_end_its_element():
    text = template.page("t", [], {"name": "</script>"})
    assert text.count("</script>") == 2
    html_pages.Page(text)


def test_the_first_finding_is_large():
    text = template.findings(
        [
            findings.Finding("problem", "one", "why"),
            findings.Finding("good", "two", ""),
        ]
    )
    assert text.count("lead") == 1 and text.index("lead") < text.index("one")


def test_the_cells_of_a_table_know_their_headings():
    """On a phone they stand below each other, and the headings are hidden."""
    text = template.table(("kind", "bytes < all"), [("sum", "8")])
    assert "<td class='number' data-label='bytes &lt; all'>8</td>" in text
    assert "class='stacks'" in text
    assert "<td class='number'>8</td>" in template.table((), [("sum", "8")])
    style = template.page("t", [])
    assert ".stacks td[data-label]::before { content: attr(data-label)" in style


def test_each_colour_that_is_used_is_defined():
    text = template.page("t", [])
    used = set(re.findall(r"var\(--([\w-]+)\)", text))
    for theme in (".ktp {", ".ktp[data-theme='dark'] {"):
        start = text.index(theme)
        rule = text[start : text.index("}", start)]
        assert used <= set(re.findall(r"--([\w-]+):", rule))


def test_a_picture_has_no_variables():
    text = colours.on_paper(".a { fill: var(--ink); }")
    assert ".a { fill: #1a2230; }" in text and "var" not in text


def test_the_style_of_a_piece_does_not_leave_it():
    text = template.piece("t", "line", [])
    style = text[text.index("<style>") : text.index("</style>")]
    for selector in re.findall(r"(?m)^([^@\s{}][^{}]*?)\s*\{", style):
        for one in selector.split(","):
            assert ".ktp" in one, selector
