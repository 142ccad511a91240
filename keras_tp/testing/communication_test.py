"""The collectives for layers that are written by hand, and their gradients."""

import keras
import numpy as np
import pytest

from keras_tp import backend
from keras_tp import distribution
from keras_tp.testing import models

ROWS, FEATURES = 8, 3


def on_each(value, n):
    return keras.ops.stack([value] * n)


# What each does, in operations of one device.
MEANING = {
    "all_reduce": lambda x, n: on_each(keras.ops.sum(x, 0), n),
    "all_gather": lambda x, n: on_each(
        keras.ops.reshape(x, (-1, *x.shape[2:])), n
    ),
    "reduce_scatter": lambda x, n: keras.ops.stack(
        keras.ops.split(keras.ops.sum(x, 0), n)
    ),
    "broadcast": lambda x, n: on_each(x[1], n),
    "scatter": lambda x, n: keras.ops.stack(keras.ops.split(x[1], n)),
}
FROM_ONE = "broadcast", "scatter"


class Collective(keras.layers.Layer):
    """What a collective makes of a weight, times the input."""

    def __init__(self, kind, devices):
        super().__init__(name="collective")
        self.kind = kind
        self.devices = devices

    def build(self, shape):
        self.held = self.add_weight(
            shape=(self.devices, ROWS, FEATURES), name="held"
        )

    def call(self, x):
        held = keras.ops.convert_to_tensor(self.held)
        current = distribution.distribution()
        if current is None:
            y = MEANING[self.kind](held, self.devices)
        else:
            options = {"source": 1} if self.kind in FROM_ONE else {}
            collective = getattr(backend.communication, self.kind)
            y = collective(held, current.device_mesh, "model", **options)
        return keras.ops.expand_dims(y, 0) * x


@pytest.mark.parametrize("kind", MEANING)
def test_values_and_gradients(kind):
    count = len(distribution.list_devices())

    def weighted_mean(y, outputs):
        return keras.ops.mean(y * outputs)

    def build():
        keras.utils.set_random_seed(1)
        inputs = keras.Input((1, 1, 1))
        model = keras.Model(inputs, Collective(kind, count)(inputs))
        # The rate is one: an update is a gradient.
        model.compile(keras.optimizers.SGD(1.0), weighted_mean)
        return model

    layout_map = distribution.LayoutMap(models.mesh())
    layout_map[".*held"] = ("model", None, None)
    plain = build()
    with distribution.ModelParallel(layout_map=layout_map).scope():
        model = build()
    rng = np.random.default_rng(0)
    x = rng.standard_normal((2, 1, 1, 1), "float32")
    y = rng.standard_normal((2, *plain.output_shape[1:]), "float32")
    before = models.values(plain)
    models.assert_close(
        [model.predict(x, verbose=0)], [plain.predict(x, verbose=0)]
    )
    models.assert_close(
        [model.train_on_batch(x, y)], [plain.train_on_batch(x, y)]
    )
    models.assert_close(models.values(model), models.values(plain))
    assert not np.array_equal(models.values(plain)[0], before[0])
    assert models.split(model)
