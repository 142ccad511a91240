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


def rows_of(count):
    return [
        (f"model/block_{n}/{name}", "(2, 2)", layout)
        for n in range(count)
        for name, layout in [("up/kernel", "column"), ("down/kernel", "row")]
    ]


def test_repeated_layers_are_joined_in_a_long_table():
    rows = [
        ("model/words/embeddings", "(9, 2)", "row"),
        *rows_of(60),
        ("model/head/kernel", "(2, 9)", "column"),
    ]
    joined, said = tables.repeats_joined(rows)
    assert joined == [
        ("model/words/embeddings", "(9, 2)", "row"),
        ("60 x model/block_[0-59]/up/kernel", "(2, 2)", "column"),
        ("60 x model/block_[0-59]/down/kernel", "(2, 2)", "row"),
        ("model/head/kernel", "(2, 9)", "column"),
    ]
    assert "sizes are those of one" in said


def test_a_layer_that_differs_has_a_row_of_its_own():
    rows = rows_of(60)
    rows[7] = (*rows[7][:2], "whole")
    joined, _ = tables.repeats_joined(rows)
    assert joined == [
        ("60 x model/block_[0-59]/up/kernel", "(2, 2)", "column"),
        ("59 x model/block_[0-59]/down/kernel", "(2, 2)", "row"),
        ("model/block_3/down/kernel", "(2, 2)", "whole"),
    ]


def test_a_number_that_is_the_same_is_kept():
    rows = [(f"model_2/block_{n}/conv2d/kernel", "x") for n in range(101)]
    joined, _ = tables.repeats_joined(rows)
    assert joined == [("101 x model_2/block_[0-100]/conv2d/kernel", "x")]


def test_a_short_table_has_all_rows():
    rows = rows_of(50)
    assert tables.repeats_joined(rows) == (rows, "")
