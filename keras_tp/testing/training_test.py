"""Training under a distribution is that of one device."""

import keras
import numpy as np
import pytest

from keras_tp import backend
from keras_tp import distribution
from keras_tp.testing import models


@pytest.mark.parametrize("name", models.CASES)
def test_training(name):
    case = models.CASES[name]
    if case.uneven and not backend.distribution_lib.splits_unevenly():
        pytest.skip("declared: all parts of a variable have one size")
    one, losses = models.trained(case)
    with models.model_parallel(case).scope():
        model, found = models.trained(case)
    assert models.split(model)
    models.assert_close(found, losses)
    models.assert_close(models.values(model), models.values(one), 1e-4)
    # Sums in another order round in another way: no error at all would mean
    # that nothing was split.
    expected = one.predict_on_batch(case.x)
    found = model.predict_on_batch(case.x)
    models.assert_close([found], [expected], 1e-4)
    assert not np.array_equal(found, expected)


@pytest.mark.parametrize("batch_size", [2, 3])
def test_batches_that_do_not_divide(batch_size):
    case = models.CASES["pair"]

    def run():
        model = models.made(case)
        # The last batch has one sample where three are asked for.
        fit = model.fit(case.x, case.y, batch_size, epochs=2, verbose=0)
        loss = model.evaluate(case.x, case.y, batch_size, verbose=0)
        return *fit.history["loss"], loss, model.predict(case.x, verbose=0)

    expected = run()
    for parallel in (
        distribution.DataParallel(models.axis("batch")),
        models.model_parallel(case),
    ):
        with parallel.scope():
            models.assert_close(run(), expected)


def test_weights_of_samples_and_classes():
    case = models.CASES["pair"]
    weights = np.arange(1.0, 1 + models.BATCH)

    def run():
        model = models.made(case)
        model.compile("sgd", "mse", weighted_metrics=["mae"])
        return [
            model.train_on_batch(case.x, case.y, weights)[1] for _ in range(2)
        ]

    expected = run()
    with models.model_parallel(case).scope():
        models.assert_close(run(), expected)


def test_a_model_without_an_input():
    case = models.CASES["pair"]

    def build():
        return keras.Sequential(
            [
                keras.layers.Dense(64, activation="tanh", name="up_0"),
                keras.layers.Dense(models.WIDTH, name="down_0"),
            ]
        )

    sequential = case._replace(build=build)
    _, losses = models.trained(sequential)
    with models.model_parallel(case).scope():
        model, found = models.trained(sequential)
    models.assert_close(found, losses)
    assert models.split(model)


def test_initial_values_and_masks_are_those_of_one_device():
    case = models.CASES["pair"]

    def build():
        inputs = keras.Input((models.WIDTH,))
        x = keras.layers.Dense(64, name="up_0")(inputs)
        x = keras.layers.Dropout(0.5, seed=3)(x)
        return keras.Model(inputs, keras.layers.Dense(16, name="down_0")(x))

    drops = case._replace(build=build)
    initial = models.values(models.made(drops))
    _, losses = models.trained(drops)
    with models.model_parallel(drops).scope():
        models.assert_close(models.values(models.made(drops)), initial, 0)
        _, found = models.trained(drops)
    models.assert_close(found, losses)


def computed_again():
    """Returns a model whose layers are computed again for gradients."""
    with keras.RematScope(mode="full"):
        return models.pairs(count=2)


def test_computing_layers_again():
    case = models.CASES["pair"]
    plain = case._replace(build=lambda: models.pairs(count=2))
    _, losses = models.trained(plain)
    with models.model_parallel(case).scope():
        model, found = models.trained(case._replace(build=computed_again))
    models.assert_close(found, losses)
    assert models.split(model)


def test_computing_layers_again_adds_no_collective():
    case = models.CASES["pair"]
    plain = case._replace(build=lambda: models.pairs(count=2))
    with models.model_parallel(case).scope():
        again, once = (
            distribution.count_collectives(models.made(c), case.x, case.y)
            for c in (case._replace(build=computed_again), plain)
        )
    assert again == once


def windows():
    """Returns a model whose pooling windows overlap."""
    inputs = keras.Input((8, 8, 4))
    x = keras.layers.Conv2D(8, 3, padding="same", name="image")(inputs)
    x = keras.layers.MaxPooling2D(3, 1, "same")(x)
    return keras.Model(inputs, keras.layers.Conv2D(4, 1)(x))


@pytest.mark.parametrize("dim", [1, 3])
def test_a_layout_of_what_a_layer_gives(dim):
    """Along the height, windows cross from one device to the next."""
    case = models.CASES["images"]
    axes = [None] * 4
    axes[dim] = "model"
    case = case._replace(build=windows, layouts={".*image/output": axes})
    one, losses = models.trained(case)
    # One axis of the mesh, and two of four devices.
    for batch in {1, len(distribution.list_devices()) // 2}:
        with models.model_parallel(case, batch).scope():
            model, found = models.trained(case)
            counted = distribution.count_collectives(model, case.x, case.y)
        models.assert_close(found, losses)
        models.assert_close(models.values(model), models.values(one), 1e-4)
        assert any(row.count for row in counted.values())
        # The last batch is smaller.
        models.assert_close(
            [model.predict(case.x, 3, verbose=0)],
            [one.predict(case.x, 3, verbose=0)],
            1e-4,
        )
