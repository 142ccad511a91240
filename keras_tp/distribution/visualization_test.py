import keras
import numpy as np
import pytest

from integration_tests import harness
from keras_tp import backend
from keras_tp import distribution as dist
from keras_tp.distribution import visualization
from keras_tp.distribution.device_mesh import DeviceMesh


class Weights(keras.layers.Layer):
    def __init__(self, shapes):
        super().__init__(name="net")
        self.made = [
            self.add_weight(shape=shape, name=f"w{k}")
            for k, shape in enumerate(shapes)
        ]


def weights(patterns, *shapes, mesh=(2, 2)):
    layout_map = dist.LayoutMap(harness.mesh(harness.fitted(mesh)))
    for name, axes in patterns.items():
        layout_map[f".*{name}"] = axes
    with dist.ModelParallel(layout_map=layout_map).scope():
        return Weights(shapes).made


def ranges_of(blocks):
    return {
        tuple(tuple(map(tuple, dim)) for dim in ranges) for ranges, *_ in blocks
    }


SHAPES = {
    "w0": (6,),
    "w1": (8, 4),
    "w2": (4, 6, 3),
    "w3": (2, 2, 8, 4),
    "w4": (3, 5),
    "w5": (),
}
PATTERNS = {
    "w0": ("model",),
    "w1": ("batch", "model"),
    "w2": (None, "model", None),
    # DTensor of TensorFlow splits a dim over one axis only.
    "w3": (None, None, "model", "batch")
    if keras.config.backend() == "tensorflow"
    else (None, None, ("batch", "model"), None),
}


@pytest.mark.parametrize("index", range(len(SHAPES)))
def test_blocks_are_those_of_the_live_arrays(index):
    name = f"w{index}"
    variable = weights(PATTERNS, *SHAPES.values())[index]
    picture = dist.visualize(variable)
    lib = backend.distribution_lib
    here = ranges_of(lib.variable_parts(variable))
    shown = ranges_of(picture.blocks)
    # Of this process only, where there are several.
    assert here <= shown
    held = {
        device: block.nbytes
        for block in picture.blocks
        for device in block.devices
    }
    assert held == lib.variable_bytes_by_device(variable)
    assert str(picture).startswith(f"net/{name} {SHAPES[name]}")
    assert repr(picture) == str(picture)


def test_a_grid_of_two_dims():
    mesh = DeviceMesh((2, 2), ["a", "b"], [f"tpu:{k}" for k in range(4)])
    blocks = visualization._blocks((8, 6), ("a", "b"), mesh, {}, 4)
    grid = visualization._grid((8, 6), ("a", "b"), mesh, blocks)
    assert grid == [
        "dim 0 down, dim 1 across",
        "      0:3     3:6",
        "    +-------+-------+",
        "0:4 | tpu:0 | tpu:1 |",
        "    +-------+-------+",
        "4:8 | tpu:2 | tpu:3 |",
        "    +-------+-------+",
    ]


def test_the_first_axis_of_a_dim_is_the_major_one():
    mesh = DeviceMesh((2, 2), ["a", "b"], [f"tpu:{k}" for k in range(4)])
    for axes, devices in ((("a", "b"), "0123"), (("b", "a"), "0213")):
        blocks = visualization._blocks((8,), (axes,), mesh, {}, 4)
        assert [block.devices for block in sorted(blocks)] == [
            [f"tpu:{k}"] for k in devices
        ]


def test_three_split_dims_have_a_table_only():
    mesh = DeviceMesh(
        (2, 2, 2), ["a", "b", "c"], [f"tpu:{k}" for k in range(8)]
    )
    blocks = visualization._blocks((4, 4, 4), ("a", "b", "c"), mesh, {}, 4)
    assert len(blocks) == 8
    assert not visualization._grid((4, 4, 4), ("a", "b", "c"), mesh, blocks)
    table = visualization._table((4, 4, 4), blocks)
    assert table[-1].split("  ")[0] == "[2:4, 2:4, 2:4]"
    assert table[-1].endswith("tpu:7")


def test_uneven_parts_and_dims_of_blocks():
    mesh = DeviceMesh((4,), ["model"], [f"tpu:{k}" for k in range(4)])
    uneven = visualization._blocks((10,), ("model",), mesh, {}, 4)
    assert [block.ranges[0] for block in uneven] == [
        [(0, 3)],
        [(3, 6)],
        [(6, 9)],
        [(9, 10)],
    ]
    assert [block.nbytes for block in uneven] == [12, 12, 12, 4]
    fused = visualization._blocks((24,), ("model",), mesh, {0: 3}, 4)
    assert fused[1].ranges[0] == [(2, 4), (10, 12), (18, 20)]
    assert fused[1].nbytes == 24


def test_a_plain_variable():
    variable = keras.Variable(np.ones((2, 3), "float32"), name="plain")
    picture = dist.visualize(variable)
    assert "24 B on one device" in picture
    (block,) = picture.blocks
    assert block.ranges == ([(0, 2)], [(0, 3)])
