import functools

import keras

from keras_tp.distribution import ahead_of_time
from keras_tp.distribution.device_mesh import DeviceMesh
from keras_tp.distribution.sharding_plan import plan_sharding


def build(depth):
    """Returns blocks of two layers with a head that is small beside many."""
    x = inputs = keras.Input((64,))
    for index in range(depth):
        y = keras.layers.LayerNormalization(name=f"norm_{index}")(x)
        y = keras.layers.Dense(256, activation="relu", name=f"up_{index}")(y)
        x += keras.layers.Dense(64, name=f"down_{index}")(y)
    x = keras.layers.LayerNormalization(name="norm")(x)
    return keras.Model(inputs, keras.layers.Dense(40, name="head")(x))


def test_a_shallow_model_is_split_as_the_deep_one():
    mesh = DeviceMesh(
        (2, 4), ["batch", "model"], [f"gpu:{i}" for i in range(8)]
    )
    shallow = functools.partial(build, 1)
    deep = functools.partial(build, 24)
    for options in ({}, {"fully_shard": "batch"}):
        alone = plan_sharding(shallow, mesh, **options)
        whole = plan_sharding(deep, mesh, **options)
        # The reason for this test.
        assert alone["head/kernel"].axes != whole["head/kernel"].axes
        plan = ahead_of_time._plan(shallow, mesh, None, deep, **options)
        for row in plan.variables:
            assert row.axes == whole[row.path].axes, row.path
        reductions = {one.path for one in plan.reductions}
        assert "head" not in reductions
        assert "up_0" in reductions


def test_overrides_stay():
    mesh = DeviceMesh((4,), ["model"], [f"gpu:{i}" for i in range(4)])
    overrides = {".*up_./kernel": (None, None), "head/kernel": (None, "model")}
    plan = ahead_of_time._plan(
        *(functools.partial(build, 1), mesh, None),
        *(functools.partial(build, 24), overrides),
    )
    assert plan["head/kernel"].axes == (None, "model")
    assert not plan["up_0/kernel"].is_split
