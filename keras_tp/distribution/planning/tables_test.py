from keras_tp.distribution.planning import tables


def test_tables_and_lines():
    columns = {"variable": tables.FOLD, "size": tables.RIGHT}
    rows = [("kernel", "12"), ("x" * 200, "5")]
    text = tables.text_of(("Title", columns, rows), "and a line")
    lines = text.splitlines()
    assert lines[0].strip() == "Title" and lines[-1] == "and a line"
    assert max(map(len, lines)) <= 120
    # A long cell is folded, not cut.
    assert text.count("x") == 200
    assert any("kernel" in line and line.endswith("12 │") for line in lines)


def test_it_is_as_wide_as_the_terminal(monkeypatch):
    columns = {"name": tables.FOLD, "why": tables.FOLD}
    table = "Title", columns, [("a" * 60, "b " * 40)]
    for setting, width in [("90", 90), ("30", 80), ("200", 147)]:
        monkeypatch.setenv("COLUMNS", setting)
        lines = tables.text_of(table).splitlines()
        assert max(map(len, lines)) == width


COLUMNS = {
    "variable": tables.FOLD,
    "size": tables.RIGHT,
    "why": tables.FOLD,
}
NAME = "attention/output/kernel"


def listed(width, monkeypatch, note):
    monkeypatch.setenv("COLUMNS", str(width))
    groups = [
        ("", [("words/embeddings", "12 B", "")]),
        ("12 x block_[0-11]", [(NAME, "5 B", note)]),
    ]
    text = tables.listing("Title", COLUMNS, groups, "a line " * 30)
    lines = text.splitlines()
    assert max(map(len, lines)) <= width
    return lines


def test_a_listing_indents_groups_and_has_notes_beside(monkeypatch):
    lines = listed(120, monkeypatch, "its reason")
    assert lines[0] == "Title"
    assert lines[2].split() == ["variable", "size", "why"]
    assert lines[4].split() == ["words/embeddings", "12", "B"]
    assert lines[5] == "12 x block_[0-11]"
    assert lines[6].split("  ")[1:] == [NAME, " 5 B", "its reason"]
    assert lines[6].index("its") == lines[2].index("why")


def test_notes_stand_below_if_there_is_no_room(monkeypatch):
    monkeypatch.setitem(COLUMNS, "size", tables.RIGHT)
    lines = listed(80, monkeypatch, "word " * 40)
    (at,) = [k for k, line in enumerate(lines) if NAME in line]
    assert lines[at].endswith("word")
    groups = [("", [("x" * 60, "5 B", "word " * 40)])]
    lines = tables.listing("Title", COLUMNS, groups).splitlines()
    assert lines[4].endswith("5 B")
    assert lines[5].startswith("      word word")
    assert max(map(len, lines)) <= 80


def test_a_name_without_room_has_a_line_of_its_own(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    groups = [("", [("x" * 78, "5 B", ""), ("short", "6 B", "")])]
    lines = tables.listing("Title", COLUMNS, groups).splitlines()
    assert lines[4] == "x" * 78
    assert lines[5].strip() == "5 B"
    assert lines[6].split() == ["short", "6", "B"]
