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
