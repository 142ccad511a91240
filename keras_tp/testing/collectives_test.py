"""A step communicates what theory asks for, and no more."""

import keras
import numpy as np

from keras_tp import distribution
from keras_tp.testing import models

# Bytes of the activations between pairs.
ACTIVATION = models.BATCH * models.WIDTH * 4


def counted(count, y=True):
    """Returns the collectives of a model of pairs that are there."""
    case = models.CASES["pair"]
    with models.model_parallel(case).scope():
        keras.utils.set_random_seed(1)
        model = models.pairs(count=count)
        model.compile("sgd", "mse")
    before = models.values(model)
    found = distribution.count_collectives(model, case.x, case.y if y else None)
    models.assert_close(models.values(model), before, 0)
    return {kind: tuple(pair) for kind, pair in found.items() if pair[0]}


def test_a_forward_pass_sums_once_for_each_pair():
    assert counted(2, y=False) == {"all_reduce": (2, 2 * ACTIVATION)}


def test_a_step_sums_each_input_that_needs_a_gradient():
    assert counted(2) == {"all_reduce": (3, 3 * ACTIVATION)}


def test_what_is_counted_is_what_a_plan_predicts():
    case = models.CASES["pair"]
    plan = distribution.plan_sharding(
        lambda: models.pairs(count=2), models.mesh()
    )
    with plan.distribution().scope():
        model = models.pairs(count=2)
        model.compile("sgd", "mse")
    found = distribution.count_collectives(model, case.x, case.y)
    for kind, pair in plan.collectives(models.BATCH).items():
        assert tuple(found[kind]) == tuple(pair), kind


def test_a_model_without_a_layout_sends_nothing():
    case = models.CASES["pair"]
    parallel = distribution.ModelParallel(
        layout_map=distribution.LayoutMap(models.mesh())
    )
    with parallel.scope():
        model = models.made(case)
    found = distribution.count_collectives(model, case.x, case.y)
    assert not np.any([pair for pair in found.values()])
