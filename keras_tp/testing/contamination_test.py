"""A distribution leaves Keras, and models without layouts, as they were."""

import numpy as np

import keras_tp
from keras_tp import distribution
from keras_tp.backend import hooks
from keras_tp.testing import models

CASE = models.CASES["transformer"]


def test_a_model_before_and_after_a_distribution():
    first, losses = models.trained(CASE)
    with models.model_parallel(CASE).scope():
        models.trained(CASE)
    distribution.set_distribution(None)
    again, found = models.trained(CASE)
    assert found == losses
    for a, b in zip(models.values(again), models.values(first), strict=True):
        np.testing.assert_array_equal(a, b)


def test_uninstall_takes_all_hooks_out():
    with models.model_parallel(CASE).scope():
        models.made(CASE)
        assert hooks.is_installed()
    distribution.set_distribution(None)
    keras_tp.uninstall()
    assert not hooks.is_installed()
