import pytest

from keras_tp import distribution as dist
from keras_tp.distribution import tensor_layout


@pytest.fixture
def mesh():
    # Nothing is placed on it.
    devices = [f"cpu:{index}" for index in range(6)]
    return dist.DeviceMesh((2, 3), ["batch", "model"], devices)


def test_sizes_of_axes(mesh):
    assert tensor_layout.axis_sizes(mesh) == {"batch": 2, "model": 3}
    entries = (None, "model", ("batch", "model"))
    assert [tensor_layout.axis_size(mesh, e) for e in entries] == [1, 3, 6]
    assert tensor_layout.axis_names(("batch", "model")) == ("batch", "model")


def test_lists_become_layouts_and_other_values_are_refused(mesh):
    layout = tensor_layout.as_layout([None, ["batch", "model"]], "layouts['w']")
    assert layout.axes == (None, ("batch", "model"))
    assert tensor_layout.as_layout(layout, "x") is layout
    for wrong in ("model", {"model": 0}, (None, 3)):
        with pytest.raises(ValueError, match=r"Received: layouts\['w'\]="):
            tensor_layout.as_layout(wrong, "layouts['w']")


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        (("model", "model"), "Repeated: .'model'"),
        ((("batch", "batch"),), "Repeated: .'batch'"),
        (("seq",), "the axes .'batch', 'model'"),
    ],
)
def test_axes_are_known_and_used_once(mesh, axes, message):
    with pytest.raises(ValueError, match=message):
        dist.TensorLayout(axes, mesh)


@pytest.mark.parametrize(
    ("axes", "shape", "expected"),
    [
        (("batch", "model"), (4, 6), ("batch", "model")),
        (("batch", "model"), (5, 6), (None, "model")),
        # Another axis than that of batches is left for the check.
        (("model", None), (5, 6), ("model", None)),
        # Unknown while tracing.
        (("batch", None), (None, 6), ("batch", None)),
        ((), (), ()),
    ],
)
def test_an_uneven_batch_is_replicated(mesh, axes, shape, expected):
    layout = dist.TensorLayout(axes, mesh)
    found = tensor_layout.batch_replicated_if_uneven(layout, shape, "batch")
    assert found.axes == expected


def test_rank_and_divisibility_are_checked(mesh):
    layout = dist.TensorLayout((None, "model"), mesh)
    tensor_layout.check_layout(layout, (4, 6), "tensor")
    tensor_layout.check_layout(layout, (4, None), "tensor")
    with pytest.raises(ValueError, match="variable 'w' has rank 1"):
        tensor_layout.check_layout(layout, (6,), "variable 'w'")
    with pytest.raises(ValueError, match="would divide: 6, 9. .*None") as e:
        tensor_layout.check_layout(layout, (4, 8), "variable 'w'")
    assert "divide it: 1, 2, 4, 8;" in str(e.value)


@pytest.mark.parametrize(
    ("axes", "shape", "expected"),
    [
        ((None, None), (6, 9), (None, "model")),
        ((None, None), (6, 10), ("model", None)),
        ((None, "batch"), (6, 12), ("model", "batch")),
        ((None, None), (4, 0), (None, None)),
    ],
)
def test_the_largest_dim_that_divides_is_split(mesh, axes, shape, expected):
    found = tensor_layout.split_largest_dim(axes, shape, "model", mesh)
    assert found == expected


def test_bytes_as_text():
    sizes = {1000: "1000 B", 1536: "1.50 KiB", 2**40: "1024.00 GiB"}
    assert {n: tensor_layout.format_bytes(n) for n in sizes} == sizes


def test_layouts_with_parts_of_different_sizes(mesh):
    layout = tensor_layout.layout_with(("model", None), mesh, True)
    assert layout.stored_shape((10, 4)) == (12, 4)
    assert tensor_layout.is_uneven((10, 4), layout)
    assert tensor_layout.part_shape((10, 4), layout.axes, mesh) == (4, 4)
    assert not tensor_layout.is_uneven((9, 4), layout)
    even = dist.TensorLayout(("model", None), mesh)
    assert even.stored_shape((10, 4)) == (10, 4)
    assert not tensor_layout.is_uneven((10, 4), even)
    tensor_layout.check_layout(layout, (10, 4), "variable 'w'", uneven=True)
    with pytest.raises(ValueError, match="size 10.*layout.uneven = True"):
        tensor_layout.check_layout(layout, (10, 4), "tensor")


def test_layouts_of_dims_in_blocks(mesh):
    blocks = {0: 3, 1: 2, 2: 1}
    axes = (None, "model", None)
    layout = tensor_layout.layout_with(axes, mesh, True, blocks)
    # A dim that is not split needs no blocks.
    assert layout.blocks == {1: 2}
    assert layout.stored_shape((4, 12, 5)) == (4, 2, 6, 5)
    assert layout.stored_axes == (None, None, "model", None)
    tensor_layout.check_layout(layout, (4, 12, 5), "variable 'w'")
    with pytest.raises(ValueError, match="2 blocks.*2 x 3 does not divide 15"):
        tensor_layout.check_layout(layout, (4, 15, 5), "tensor", uneven=True)
    slot = tensor_layout.layout_like(("model",), layout, [1])
    assert slot.blocks == {0: 2} and slot.uneven
    assert tensor_layout.splits_alike(layout, layout)
    plain = dist.TensorLayout(axes, mesh)
    assert not tensor_layout.splits_alike(layout, plain)
    assert tensor_layout.layout_like(axes, plain).blocks == {}
