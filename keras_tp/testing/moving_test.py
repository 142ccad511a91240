"""A model that exists is moved to a distribution and back."""

import keras

from keras_tp import distribution
from keras_tp.testing import models

CASE = models.CASES["pair"]


def test_a_trained_model_moves_there_and_back():
    one, _ = models.trained(CASE)
    model, _ = models.trained(CASE)
    before = models.values(model)
    distribution.distribute_model(model, models.model_parallel(CASE))
    assert models.split(model)
    models.assert_close(models.values(model), before, 0)

    def step(of):
        return of.train_on_batch(CASE.x, CASE.y)

    models.assert_close([step(model)], [step(one)])
    devices = distribution.list_devices()[:1]
    distribution.distribute_model(
        model, distribution.DataParallel(devices=devices)
    )
    assert not models.split(model)
    models.assert_close([step(model)], [step(one)])


def test_slots_are_laid_out_like_their_variables():
    with models.model_parallel(CASE).scope():
        model, _ = models.trained(CASE)
    count = len(distribution.list_devices())
    rows = {row.path: row for row in distribution.describe(model).rows}
    kinds = {"weight": 0, "slot": 0}
    for row in rows.values():
        if row.is_split:
            kinds[row.role] += 1
            assert set(row.device_bytes.values()) == {row.bytes // count}
    # Adam has two slots for each variable.
    assert kinds["weight"] and kinds["slot"] == 2 * kinds["weight"]


def test_factored_slots_are_split_like_their_variables():
    with models.model_parallel(CASE).scope():
        model = CASE.build()
        model.compile(keras.optimizers.Adafactor(0.01), "mse")
        model.train_on_batch(CASE.x, CASE.y)
    rows = distribution.describe(model).rows
    split = [row for row in rows if row.role == "slot" and row.is_split]
    # Of each kernel, the sums of rows or of columns; of a bias, both slots.
    assert len(split) >= 3


def test_slots_split_over_the_batch_axis():
    devices = distribution.list_devices()
    _, losses = models.trained(CASE)
    layout_map = distribution.LayoutMap(models.mesh(batch=len(devices)))
    parallel = distribution.ModelParallel(
        layout_map=layout_map, shard_optimizer=True
    )
    with parallel.scope():
        model, found = models.trained(CASE)
    models.assert_close(found, losses)
    split = 0
    for row in distribution.describe(model).rows:
        if row.role == "slot" and len(row.shape) > 1:
            split += 1
            held = set(row.device_bytes.values())
            assert held == {row.bytes // len(devices)}, row.path
    assert split


def compiled():
    """At the top of a module, where a child process finds it."""
    return models.made(CASE)


def test_a_check_against_one_device():
    report = distribution.verify(
        compiled, models.model_parallel(CASE), CASE.x, CASE.y
    )
    assert report.passed, str(report)


def test_a_model_remembers_its_distribution():
    parallel = models.model_parallel(CASE)
    with parallel.scope():
        model = models.made(CASE)
    assert keras.distribution.distribution() is None
    _, losses = models.trained(CASE)
    found = [model.train_on_batch(CASE.x, CASE.y) for _ in range(3)]
    models.assert_close(found, losses)
