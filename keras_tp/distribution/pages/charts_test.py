import re

import pytest

from keras_tp.distribution.pages import charts


def widths(text):
    pairs = re.findall(r"x='([\d.]+)%' y='0' width='([\d.]+)%'", text)
    return [tuple(map(float, pair)) for pair in pairs]


def test_a_stack():
    text = charts.bar({"slots": 30, "gradients": 10}, 80, limit=60)
    assert widths(text) == [(0, 37.5), (37.5, 12.5)]
    assert "x1='75.000%'" in text and "hidden" not in text
    assert "hidden" in charts.bar({"slots": 1}, 0)


@pytest.mark.parametrize(
    ["mark", "blocks", "boxes"],
    [
        ("column", 1, ["0 0 5 8", "5 0 5 8", "10 0 5 8", "15 0 5 8"]),
        ("row", 1, ["0 0 20 2", "0 2 20 2", "0 4 20 2", "0 6 20 2"]),
        ("whole", 1, []),
    ],
)
def test_the_parts_of_a_matrix(mark, blocks, boxes):
    text = charts.split_icon(mark, 20, 8, blocks=blocks)
    found = re.findall(
        r"fill-d\d' x='(\S+)' y='(\S+)' width='(\S+)' height='(\S+)'", text
    )
    assert [" ".join(box) for box in found] == boxes


def test_each_block_is_split():
    text = charts.split_icon("column", 24, 8, blocks=3, parts=2)
    devices = re.findall(r"fill-d(\d)", text)
    assert devices == ["0", "1"] * 3
