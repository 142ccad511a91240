"""Where a plan splits activations along the sequence."""

import keras
import pytest

from keras_tp.distribution import DeviceMesh
from keras_tp.distribution import plan_sharding

COUNT, LENGTH, WIDTH = 4, 8, 16
layers = keras.layers


def mesh():
    names = [f"cpu:{i}" for i in range(COUNT)]
    return DeviceMesh((COUNT,), ["model"], names)


def plan_of(build, **kwargs):
    return plan_sharding(build, mesh(), sequence_parallel=True, **kwargs)


def around(plan):
    """Returns the paths of the kernels beside split activations."""
    return [row.path for row in plan.variables if row.sequence_parallel]


def scattered(plan):
    return [(r.path, r.backward) for r in plan.reductions if r.scattered]


def feed_forward(x, k, norm=True):
    y = layers.LayerNormalization(name=f"norm_{k}")(x) if norm else x
    y = layers.Dense(2 * WIDTH, activation="relu", name=f"up_{k}")(y)
    return layers.Dense(WIDTH, name=f"down_{k}")(y)


def text(length=LENGTH):
    inputs = keras.Input((length,), dtype="int32")
    return inputs, layers.Embedding(64, WIDTH, name="lookup")(inputs)


@pytest.mark.parametrize("length", [LENGTH, None])
def test_a_residual_stream(length):
    def build():
        inputs, x = text(length)
        x = x + layers.Dropout(0.1)(feed_forward(x, 0))
        return keras.Model(inputs, x + feed_forward(x, 1))

    plan = plan_of(build)
    kernels = ["lookup/embeddings"]
    kernels += [f"{n}_{k}/kernel" for k in (0, 1) for n in ("up", "down")]
    assert around(plan) == kernels
    assert scattered(plan) == [
        ("lookup", False),
        ("up_0", True),
        ("down_0", False),
        ("up_1", True),
        ("down_1", False),
    ]
    # What each device has for its positions alone.
    others = [r for r in plan.reductions if not r.scattered]
    assert [r.path for r in others] == ["norm_0", "norm_0", "down_0"] + [
        "norm_1",
        "norm_1",
        "down_1",
    ]
    assert all(r.backward for r in others)
    assert all(row.is_predicted for row in plan.variables)
    batch = 2
    activation = batch * LENGTH * WIDTH * 4
    args = (batch,) if length else (batch, LENGTH)
    found = plan.collectives(*args)
    assert found["all_gather"] == (5, 5 * activation)
    assert found["reduce_scatter"] == (5, 5 * activation // COUNT)
    whole = plan_sharding(build, mesh()).memory(*args)
    assert plan.memory(*args)["activations"] < whole["activations"]


def test_it_ends_where_a_position_is_taken():
    def build():
        inputs, x = text()
        x = x + feed_forward(x, 0)
        return keras.Model(inputs, layers.Dense(3, name="head")(x[:, 0]))

    plan = plan_of(build)
    assert "lookup/embeddings" in around(plan)
    reason = plan["down_0/kernel"].why
    assert "GetItem in" in reason and "does not predict" in reason
    # The sum of the head's input is of another kind.
    assert "head/kernel" not in around(plan)


def test_whole_activations_that_join():
    def build():
        inputs = keras.Input((LENGTH, WIDTH))
        x = layers.LayerNormalization(name="first")(inputs)
        return keras.Model(inputs, x + feed_forward(x, 0, norm=False))

    plan = plan_of(build)
    # The input of `up_0` is whole.
    assert around(plan) == ["down_0/kernel"]
    assert "combines it with whole" in plan["down_0/kernel"].why


class Positions(layers.Layer):
    """Adds a vector for each position."""

    def build(self, shape):
        self.table = self.add_weight(shape=shape[1:], name="table")

    def call(self, x):
        return x + self.table


def test_a_table_of_positions():
    def build():
        inputs, x = text()
        x = Positions(name="positions")(x)
        return keras.Model(inputs, x + feed_forward(x, 0))

    plan = plan_of(build)
    assert "Add in 'positions'" in plan["lookup/embeddings"].why
    # It gets a part of its gradient for each part of the sequence, not a sum.
    assert "positions" not in [r.path for r in plan.reductions]
    assert "up_0/kernel" in around(plan)


def test_a_product_along_the_sequence():
    def build():
        inputs, x = text()
        mixed = layers.EinsumDense("abc,bd->adc", (LENGTH, WIDTH), name="mix")
        return keras.Model(inputs, mixed(x))

    plan = plan_of(build)
    assert "Einsum in 'mix'" in plan["lookup/embeddings"].why


def test_a_length_that_does_not_divide():
    def build():
        inputs, x = text(LENGTH + 1)
        return keras.Model(inputs, x + feed_forward(x, 0))

    with pytest.warns(UserWarning, match="changes nothing"):
        plan = plan_of(build)
    assert around(plan) == scattered(plan) == []


def test_it_is_off_by_default():
    def build():
        inputs, x = text()
        return keras.Model(inputs, x + feed_forward(x, 0))

    plan = plan_sharding(build, mesh())
    assert around(plan) == scattered(plan) == []
    assert "sequence_parallel" not in plan.to_json()
