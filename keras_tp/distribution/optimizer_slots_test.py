import types

import keras
import numpy as np
import pytest
from keras import layers

from integration_tests import harness
from keras_tp import distribution as dist
from keras_tp.distribution import optimizer_slots
from keras_tp.distribution.optimizer_slots import slot_layout


@pytest.fixture
def mesh():
    # Nothing is placed on it.
    devices = [f"cpu:{index}" for index in range(4)]
    return dist.DeviceMesh((2, 2), ["batch", "model"], devices)


def built(optimizer):
    layer = layers.Dense(6)
    layer.build((None, 4))
    optimizer.build(layer.trainable_variables)
    return layer, optimizer


def kinds(optimizer):
    """Slots of the kernel and the bias of a layer: shapes and dims."""
    return [
        (variable.name, tuple(slot.shape), tuple(dims))
        for slot, variable, dims in optimizer_slots.slots_of(optimizer)
    ]


def test_slots_have_all_dims_of_their_variable():
    _, adam = built(keras.optimizers.Adam())
    kernel, bias = ("kernel", (4, 6), (0, 1)), ("bias", (6,), (0,))
    assert sorted(kinds(adam)) == sorted([kernel, bias] * 2)
    assert kinds(built(keras.optimizers.SGD())[1]) == []


def test_factors_have_the_dims_that_are_not_summed():
    _, adafactor = built(keras.optimizers.Adafactor())
    found = [row for row in kinds(adafactor) if row[0] == "kernel"]
    assert ("kernel", (4,), (0,)) in found and ("kernel", (6,), (1,)) in found


def test_optimizers_inside_an_optimizer():
    inner = keras.optimizers.SGD(momentum=0.9)
    _, outer = built(keras.optimizers.LossScaleOptimizer(inner))
    assert {row[0] for row in kinds(outer)} == {"kernel", "bias"}


@pytest.mark.parametrize(
    ("axes", "shape", "dims", "expected"),
    [
        ((None, "model"), (4, 6), (0, 1), ("batch", "model")),
        # The largest dim that divides evenly.
        ((None, None), (4, 6), (0, 1), (None, "batch")),
        ((None, None), (4, 7), (0, 1), ("batch", None)),
        ((None, "model"), (3, 6), (0, 1), (None, "model")),
        # The batch axis is in use already.
        (
            (None, ("batch", "model")),
            (4, 8),
            (0, 1),
            (None, ("batch", "model")),
        ),
        # A factor without the dim that the variable is split along.
        ((None, "model"), (4,), (0,), ("batch",)),
    ],
)
def test_slots_split_over_the_batch_axis_too(mesh, axes, shape, dims, expected):
    sharding = types.SimpleNamespace(
        batch_dim_name="batch", shard_optimizer=True
    )
    layout = dist.TensorLayout(axes, mesh)
    assert slot_layout(layout, shape, dims, sharding).axes == expected
    kept = tuple(axes[dim] for dim in dims)
    assert slot_layout(layout, shape, dims, None).axes == kept


def weights_after_two_updates(make, layer):
    optimizer = make()
    optimizer.build(layer.trainable_variables)
    for step in range(2):
        # As a custom loop may have them: whole, on one device.
        gradients = [
            keras.ops.convert_to_tensor(np.full(v.shape, step + 0.5, "float32"))
            for v in layer.trainable_variables
        ]
        optimizer.apply(gradients, layer.trainable_variables)
    return layer.get_weights()


@pytest.mark.parametrize(
    "make",
    [
        lambda: keras.optimizers.Adam(0.1),
        lambda: keras.optimizers.SGD(0.1),
        pytest.param(
            lambda: keras.optimizers.LossScaleOptimizer(
                keras.optimizers.SGD(0.1)
            ),
            marks=pytest.mark.skipif(
                keras.config.backend() == "jax",
                reason="Keras's `apply` fails outside of a stateless scope",
            ),
        ),
    ],
    ids=["adam", "sgd", "loss_scale"],
)
def test_an_optimizer_that_is_made_outside_of_the_distribution(make):
    def dense():
        keras.utils.set_random_seed(2)
        layer = layers.Dense(6, name="up")
        layer.build((None, 4))
        return layer

    expected = weights_after_two_updates(make, dense())
    layouts, shape = {".*kernel": (None, "model")}, harness.fitted((1, 2))
    with harness.model_parallel(layouts, shape).scope():
        layer = dense()
    found = weights_after_two_updates(make, layer)
    for a, b in zip(found, expected):
        np.testing.assert_allclose(a, b, rtol=1e-6)
