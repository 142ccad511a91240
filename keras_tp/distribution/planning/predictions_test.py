import collections

import keras
import pytest
from keras import layers

from keras_tp import distribution
from keras_tp.distribution.device_mesh import DeviceMesh
from keras_tp.distribution.planning import predictions


def build():
    tokens = keras.Input((None,), dtype="int32")
    x = layers.Embedding(64, 32, name="table")(tokens)
    y = layers.Dense(128, activation="gelu", name="up")(x)
    return keras.Model(tokens, x + layers.Dense(32, name="down")(y))


def plan(shape, **kwargs):
    count = shape[0] * shape[1]
    devices = [f"tpu:{k}" for k in range(count)]
    mesh = DeviceMesh(shape, ["batch", "model"], devices)
    return distribution.plan_sharding(build, mesh, **kwargs)


@pytest.mark.parametrize("shape", [(1, 2), (2, 2)])
@pytest.mark.parametrize("option", ["sequence_parallel", "fully_shard", None])
def test_the_rows_add_up_to_the_collectives(shape, option):
    made = plan(shape, **({option: shape[0] > 1} if option else {}))
    count, size = collections.Counter(), collections.Counter()
    for row in predictions.communications(made):
        count[row.kind] += 1
        size[row.kind] += row.at(8 // shape[0], 16)
    found = made.collectives(8, 16)
    assert {kind: tuple(pair) for kind, pair in found.items()} == {
        kind: (count[kind], size[kind]) for kind in count
    }


def test_reasons_and_paths():
    rows = predictions.communications(plan((2, 2)))
    found = {(row.path, row.kind, row.reason) for row in rows}
    assert {
        ("table", "all_reduce", "forward"),
        ("up", "all_reduce", "backward"),
        ("down", "all_reduce", "forward"),
        ("up/kernel", "all_reduce", "variable"),
    } <= found


def test_a_scattered_sum_is_gathered_in_the_other_pass():
    made = plan((1, 2), sequence_parallel=True)
    found = {
        (row.path, row.kind, row.reason, row.parts)
        for row in predictions.communications(made)
    }
    assert ("down", "reduce_scatter", "forward", 2) in found
    assert ("down", "all_gather", "backward", 1) in found
    assert ("up", "all_gather", "forward", 1) in found


def test_a_length_is_asked_for():
    made = plan((1, 2))
    with pytest.raises(ValueError, match="pass `sequence_length`"):
        made.collectives(8)
    with pytest.raises(ValueError, match="pass `sequence_length`"):
        made.memory(8)
