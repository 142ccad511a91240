"""Whole models: the numbers of plain Keras on one device, on every mesh."""

import numpy as np
import pytest

from integration_tests import harness
from integration_tests import zoo

TOLERANCE = 1e-5
# Adam divides a gradient by its size: where the true one is zero, rounding
# errors become whole steps.
TOLERANCE_ADAM_AMPLIFIED = 1e-4


@pytest.fixture(params=zoo.CASES)
def name(request):
    return request.param


@harness.MESHES
def test_sgd(name, shape):
    case = zoo.CASES[name]
    expected = harness.reference(name, "sgd")
    with harness.model_parallel(case.layouts, shape).scope():
        model = harness.build(case)
    assert harness.split_paths(model) == case.split
    run = harness.train(case, model, "sgd")
    assert harness.split_paths(model) == case.split

    assert run.initial.keys() == expected.initial.keys()
    for path, value in run.initial.items():
        np.testing.assert_array_equal(value, expected.initial[path], path)

    differences = harness.differences(run, expected)
    losses = harness.loss_difference(run, expected)
    worst = max(differences, key=differences.get)
    harness.log_measurement(
        name, shape, "sgd", losses, differences[worst], worst
    )
    assert losses <= TOLERANCE
    assert differences[worst] <= TOLERANCE, worst
    # Partial sums are added in another order than on one device: a model that
    # does not differ in one bit was not sharded.
    if case.reduces:
        assert differences[worst] > 0

    # A weight that stays where it was would agree whatever its gradient.
    for path in case.split:
        moved = harness.difference(run.weights[path], run.initial[path])
        if path in case.zero_gradient:
            assert moved <= TOLERANCE, path
        else:
            assert moved >= 100 * TOLERANCE, path


@harness.MESHES
def test_adam(name, shape):
    case = zoo.CASES[name]
    expected = harness.reference(name, "adam")
    with harness.model_parallel(case.layouts, shape).scope():
        model = harness.build(case)
    run = harness.train(case, model, "adam")
    assert harness.split_paths(model) == case.split

    losses = harness.loss_difference(run, expected)
    differences = harness.differences(run, expected)
    worst = max(differences, key=differences.get)
    harness.log_measurement(
        name, shape, "adam", losses, differences[worst], worst
    )
    amplified = case.zero_gradient
    assert losses <= (TOLERANCE_ADAM_AMPLIFIED if amplified else TOLERANCE)
    if case.reduces:
        assert differences[worst] > 0
    # Adam did something.
    assert abs(run.losses[-1] / run.losses[0] - 1) > 100 * TOLERANCE
