import pytest

from keras_tp.distribution.device_mesh import DeviceMesh
from keras_tp.distribution.planning.cost import Size
from keras_tp.distribution.planning.plan_rows import PlannedGather
from keras_tp.distribution.planning.plan_rows import PlannedVariable


def row(axes, blocks=1, shape=(4, 6), dtype="float16"):
    return PlannedVariable(
        "d/kernel", shape, dtype, True, axes, blocks, "why", ("", "")
    )


@pytest.mark.parametrize(
    ("planned", "is_split"),
    [
        (row((None, "model")), True),
        (row((None, ("a", "b"))), True),
        (row((None, None)), False),
        (row((None, "model"), blocks=3), True),
    ],
)
def test_what_is_split(planned, is_split):
    assert planned.is_split is is_split


def test_bytes_of_the_whole_variable():
    assert row((None, None)).nbytes == 4 * 6 * 2
    assert row((None, None), dtype="bool").nbytes == 4 * 6


def test_a_batch_with_an_example_more_is_not_split():
    mesh = DeviceMesh(
        (2, 2), ["batch", "model"], [f"tpu:{i}" for i in range(4)]
    )
    axes = (None, None, "model")
    for added, first in ((0, "batch"), (1, None)):
        gather = PlannedGather("up", axes, False, Size(8, 1, 0, 0, added))
        assert gather.layout(mesh, "batch").axes == (first, None, None)
