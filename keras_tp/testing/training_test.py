"""Training under a distribution is that of one device."""

import pytest

from keras_tp import backend
from keras_tp import distribution
from keras_tp.testing import models


@pytest.mark.parametrize("name", models.CASES)
def test_training(name):
    case = models.CASES[name]
    if case.uneven and not backend.distribution_lib.splits_unevenly():
        pytest.skip("all parts of a variable have one size")
    one, losses = models.trained(case)
    with models.model_parallel(case).scope():
        model, found = models.trained(case)
    assert any(
        any(backend.distribution_lib.variable_axes(v) or ())
        for v in model.trainable_variables
    )
    models.assert_close(found, losses)
    models.assert_close(models.values(model), models.values(one), 1e-4)
    # Sums in another order round in another way: nothing else has no error.
    expected = one.predict_on_batch(case.x)
    models.assert_close([model.predict_on_batch(case.x)], [expected], 1e-4)


@pytest.mark.parametrize("name", ["pair", "transformer"])
def test_training_with_a_plan(name):
    case = models.CASES[name]
    _, losses = models.trained(case)
    with distribution.TensorParallel(models.mesh()).scope():
        model, found = models.trained(case)
    models.assert_close(found, losses)
    rows = distribution.describe(model)
    assert rows


def test_training_with_a_batch_axis():
    case = models.CASES["pair"]
    _, losses = models.trained(case)
    mesh = models.mesh(batch=len(distribution.list_devices()))
    with distribution.DataParallel(mesh).scope():
        _, found = models.trained(case)
    models.assert_close(found, losses)
