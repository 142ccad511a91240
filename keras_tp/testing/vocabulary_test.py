"""Losses and metrics of a split vocabulary, without a gather of logits."""

import keras
import numpy as np
import pytest
from keras import losses
from keras import metrics

from keras_tp import distribution
from keras_tp.testing import models

CLASSES = 512
RNG = np.random.default_rng(0)
X = RNG.standard_normal((models.BATCH, models.LENGTH, models.WIDTH), "float32")
CLASS = RNG.integers(0, CLASSES, (models.BATCH, models.LENGTH), "int32")
ONE_HOT = np.eye(CLASSES, dtype="float32")[CLASS]
CASES = {
    "sparse": (
        CLASS,
        lambda: losses.SparseCategoricalCrossentropy(True),
        lambda: "accuracy",
    ),
    "dense": (
        ONE_HOT,
        lambda: losses.CategoricalCrossentropy(True),
        lambda: "accuracy",
    ),
    "top_k": (
        CLASS,
        lambda: losses.SparseCategoricalCrossentropy(True),
        lambda: metrics.SparseTopKCategoricalAccuracy(3, name="top"),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_losses_and_metrics(name):
    y, loss, metric = CASES[name]

    def build():
        keras.utils.set_random_seed(1)
        inputs = keras.Input(X.shape[1:])
        outputs = keras.layers.Dense(CLASSES, name="words")(inputs)
        model = keras.Model(inputs, outputs)
        model.compile(keras.optimizers.SGD(0.1), loss(), metrics=[metric()])
        return model

    def run(model):
        return [
            number for _ in range(3) for number in model.train_on_batch(X, y)
        ]

    expected = run(build())
    case = models.CASES["transformer"]
    only = {k: v for k, v in case.layouts.items() if "words" in k}
    with models.model_parallel(case._replace(layouts=only)).scope():
        model = build()
        found = distribution.count_collectives(model, X, y)
        models.assert_close(run(model), expected)
    assert models.split(model)
    # A few numbers for each token are sent, not its logits.
    tokens = 4 * models.BATCH * models.LENGTH
    for kind, (_, size) in found.items():
        assert size < tokens * CLASSES / 8, kind
