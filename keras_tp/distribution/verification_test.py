import functools
import random

import keras
import numpy as np
import pytest
from keras import layers
from keras.src.backend.common import global_state

from integration_tests import harness
from integration_tests import zoo
from keras_tp import distribution as dist

SHAPE = harness.fitted((1, 2))


def compiled(name, optimizer):
    """A model of the zoo, as a child process can build it too."""
    case = zoo.CASES[name]
    model = case.build()
    model.compile(harness.optimizer(optimizer, case), case.loss)
    return model


def verified(name, optimizer, shape=SHAPE, **kwargs):
    case = zoo.CASES[name]
    return dist.verify(
        functools.partial(compiled, name, optimizer),
        harness.model_parallel(case.layouts, shape),
        *harness.data_of(case),
        **kwargs,
    )


@pytest.mark.parametrize(
    "name, optimizer, shape",
    [
        ("mlp", "sgd", (1, 4)),
        ("multi_head_attention", "adam", (2, 2)),
        ("lstm", "sgd", (1, 2)),
    ],
)
def test_a_right_model_passes(name, optimizer, shape):
    report = verified(name, optimizer, harness.fitted(shape))
    assert report.passed, report
    assert report.layer is report.where is None
    assert len(report.losses) == 5
    assert report.losses[0][0] != report.losses[4][0]
    # Sums over devices are rounded in another order.
    assert 0 < report.weight_difference <= 1e-5
    assert report.loss_difference <= 1e-5
    compared = sum(weight.compared for weight in report.weights)
    size = sum(weight.size for weight in report.weights)
    assert compared == size if optimizer == "sgd" else compared > 0.9 * size
    if name == "multi_head_attention":
        by_path = {weight.path: weight for weight in report.weights}
        # Its true gradient is zero.
        assert by_path["attention/key/bias"].compared == 0
        assert by_path["attention/query/kernel"].layer == "attention/query"
        names = [path for path, _ in report.outputs]
        assert names.index("attention/query") < names.index("attention")
        assert names.index("attention") < names.index("head")


def test_batches_seed_and_what_is_left_behind():
    case = zoo.CASES["mlp"]
    x, y = harness.data_of(case)
    outer = harness.model_parallel(case.layouts, SHAPE)
    with outer.scope():
        layers.Dense(1)
        state = random.getstate(), np.random.get_state()[1].tolist()
        counters = dict(global_state.get_global_attribute("object_name_uids"))
        report = verified("mlp", "sgd", steps=3, batch_size=3, seed=2)
        assert dist.distribution() is outer
        assert counters == global_state.get_global_attribute("object_name_uids")
        assert state[0] == random.getstate()
        assert state[1] == np.random.get_state()[1].tolist()
    assert report.passed
    text = str(report)
    assert "passed=True" in text
    assert f"{report.losses[1][1]:.8g}" in text
    assert report.weights[0].path in text
    # Batches go on from the start of the data; the seed is that of both.
    keras.utils.set_random_seed(2)
    model = compiled("mlp", "sgd")
    for step, (plain, _) in enumerate(report.losses):
        rows = np.arange(3 * step, 3 * step + 3) % len(x)
        want = model.train_on_batch(x[rows], y[rows])
        np.testing.assert_allclose(plain, np.ravel(want)[0], rtol=1e-6)


def test_a_function_that_no_child_can_import():
    case = zoo.CASES["mlp"]
    distribution = harness.model_parallel(case.layouts, SHAPE)
    with pytest.raises(ValueError, match="functools.partial.*Received"):
        dist.verify(lambda: None, distribution, *harness.data_of(case))


def test_no_steps():
    with pytest.raises(ValueError, match="`steps`.*Received: steps=0"):
        verified("mlp", "sgd", steps=0)


def test_a_child_that_fails():
    """Its model is not compiled."""
    case = zoo.CASES["mlp"]
    distribution = harness.model_parallel(case.layouts, SHAPE)
    with pytest.raises(RuntimeError, match="exit code 1"):
        dist.verify(zoo.mlp, distribution, *harness.data_of(case))


def narrower():
    """A model with fewer units under a distribution."""
    inputs = keras.Input((zoo.FEATURES,))
    units = 16 if dist.distribution() is None else 8
    x = zoo.dense(units, "up")(inputs)
    model = keras.Model(inputs, zoo.dense(zoo.OUTPUTS, "down")(x))
    model.compile("sgd", "mse")
    return model


def test_another_model_each_time():
    data = harness.data_of(zoo.CASES["mlp"])
    distribution = harness.model_parallel({}, SHAPE)
    with pytest.raises(ValueError, match="same model every time"):
        dist.verify(narrower, distribution, *data, steps=1)
