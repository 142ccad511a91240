import pytest

from keras_tp.distribution.planning.plan_rows import PlannedVariable


def row(axes, blocks=1, shape=(4, 6), dtype="float16"):
    return PlannedVariable(
        "d/kernel", shape, dtype, True, axes, blocks, "why", ("", "")
    )


@pytest.mark.parametrize(
    ("planned", "axes", "is_split"),
    [
        (row((None, "model")), (None, "model"), True),
        (row((None, ("a", "b"))), (None, ("a", "b")), True),
        (row((None, None)), (None, None), False),
        # No Keras layout splits a dim in blocks.
        (row((None, "model"), blocks=3), (None, None), False),
    ],
)
def test_layouts(planned, axes, is_split):
    assert planned.layout_axes == axes
    assert planned.is_split is is_split


def test_bytes_of_the_whole_variable():
    assert row((None, None)).nbytes == 4 * 6 * 2
    assert row((None, None), dtype="bool").nbytes == 4 * 6
