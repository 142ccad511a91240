"""`DistributionMonitor`: what it prints, and what it adds to the logs."""

import csv

import keras
import numpy as np
import pytest

import keras_tp
from integration_tests import harness
from keras_tp import distribution as dist
from keras_tp.backend import distribution_lib as lib
from keras_tp.callbacks import DistributionMonitor

X = np.random.default_rng(0).normal(size=(24, 16)).astype("float32")


def model_of(has_input=True):
    model = keras.Sequential(
        [
            *([keras.Input((16,))] if has_input else []),
            keras.layers.Dense(32, activation="gelu", name="up"),
            keras.layers.Dense(16, name="down"),
        ]
    )
    model.compile("adam", "mse")
    return model


def planned():
    return dist.TensorParallel(harness.mesh(harness.fitted((1, 4))))


def fit(model, *callbacks, epochs=2, **kwargs):
    arguments = {"batch_size": 8, "verbose": 0, **kwargs}
    return model.fit(X, X, epochs=epochs, callbacks=callbacks, **arguments)


def printed(capsys):
    """Returns what process 0 printed; other processes print nothing."""
    said = capsys.readouterr().out
    if lib.process_id() == 0:
        return said
    assert said == ""
    return None


@pytest.mark.parametrize("has_input", [True, False])
def test_it_tells_how_the_model_is_distributed(has_input, capsys):
    with planned().scope():
        model = model_of(has_input)
    fit(model, DistributionMonitor(batch_size=8))
    said, report = printed(capsys), dist.describe(model)
    if said is None:
        return
    lines = said.splitlines()
    assert len(lines) == 5
    count = harness.fitted((1, 4))[1]
    assert f"mesh {{'batch': 1, 'model': {count}}}" in lines[0]
    share = report.split_bytes / report.total_bytes
    assert f"split: {share:.1%} of" in lines[1]
    assert "down/bias" in lines[2]
    assert "on each device: " in lines[3]
    assert "predicted: 1 x all-reduce (512 B)" in lines[4]


def test_collectives_are_counted_on_a_batch(capsys):
    with planned().scope():
        model = model_of()
    before = [keras.ops.convert_to_numpy(v) for v in model.variables]
    monitor = DistributionMonitor(batch=(X[:8], X[:8]))
    monitor.set_model(model)
    monitor.on_train_begin()
    counted = dist.count_collectives(model, X[:8], X[:8])
    said = printed(capsys)
    if said is not None:
        count, size = counted["all_reduce"]
        assert f"counted: {count} x all-reduce ({size} B)" in said
    for variable, value in zip(model.variables, before):
        np.testing.assert_array_equal(
            keras.ops.convert_to_numpy(variable), value
        )


def test_its_numbers_are_in_the_logs(tmp_path):
    with planned().scope():
        model = model_of()
    path = tmp_path / "log.csv"
    monitor = DistributionMonitor(batch_size=8, sequence_length=10)
    history = fit(model, monitor, keras.callbacks.CSVLogger(path)).history
    assert all(0 < ms < 60_000 for ms in history["step_ms"])
    for ms, samples, tokens in zip(
        history["step_ms"], history["samples_per_s"], history["tokens_per_s"]
    ):
        assert samples == pytest.approx(8 / (ms / 1000))
        assert tokens == pytest.approx(10 * samples)
    # The interpreter and a framework are in it.
    assert all(50 < mib < 2**20 for mib in history["memory_mib"])
    lib.meet("the log")
    with open(path) as file:
        rows = list(csv.DictReader(file))
    # Process 0 writes the file, and its times are its own.
    written = [float(row["step_ms"]) for row in rows]
    assert len(written) == 2
    assert lib.process_id() or written == history["step_ms"]


def test_tensorboard_has_its_numbers(tmp_path):
    pytest.importorskip("tensorflow", reason="the callback writes with it")
    events = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator",
        reason="it reads the file",
    )
    from tensorboard.util import tensor_util

    with planned().scope():
        model = model_of()
    board = keras.callbacks.TensorBoard(tmp_path)
    history = fit(model, DistributionMonitor(batch_size=8), board).history
    lib.meet("the events")
    if lib.process_id():
        return
    written = events.EventAccumulator(
        str(tmp_path / "train"), {events.TENSORS: 0}
    )
    written.Reload()
    for name in ("step_ms", "samples_per_s", "memory_mib"):
        found = [
            float(tensor_util.make_ndarray(event.tensor_proto))
            for event in written.Tensors(f"epoch_{name}")
        ]
        assert found == pytest.approx(history[name], rel=1e-6)


def test_the_first_step_does_not_count():
    monitor = DistributionMonitor(batch_size=8)
    monitor.on_epoch_begin(0)
    logs = {}
    monitor.on_train_batch_end(0)
    monitor.on_epoch_end(0, logs)
    assert "step_ms" not in logs
    # Four steps in one call, and the call before it is the first one.
    first = monitor._first[1]
    monitor._last = 4, first + 2.0
    monitor.on_epoch_end(0, logs)
    assert logs["step_ms"] == pytest.approx(500)
    assert logs["samples_per_s"] == pytest.approx(16)


def test_losses_are_those_without_it():
    def losses(*callbacks):
        keras.utils.set_random_seed(0)
        with planned().scope():
            model = model_of()
        return fit(model, *callbacks).history["loss"]

    assert losses() == losses(DistributionMonitor(batch=(X[:8], X[:8])))


@pytest.mark.skipif(
    keras.config.backend() == "torch" and lib.num_processes() > 1,
    reason="one device is no part of the mesh of several processes",
)
def test_a_model_that_is_not_distributed(capsys):
    model = model_of()
    history = fit(model, DistributionMonitor()).history
    assert "not distributed" in capsys.readouterr().out
    assert "step_ms" in history
    assert "samples_per_s" not in history


@pytest.mark.parametrize(
    ["arguments", "message"],
    [
        ({"batch_size": 0}, "must be a positive integer"),
        ({"batch_size": 8, "sequence_length": "9"}, "`sequence_length` must"),
        ({"sequence_length": 9}, "needs `batch_size`"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        keras_tp.callbacks.DistributionMonitor(**arguments)


def test_no_plan_and_no_batch(capsys):
    layout_map = dist.LayoutMap(harness.mesh(harness.fitted((1, 4))))
    layout_map[".*up/kernel"] = (None, "model")
    layout_map[".*down/kernel"] = ("model", None)
    with dist.ModelParallel(layout_map=layout_map).scope():
        model = model_of()
    fit(model, DistributionMonitor(batch_size=8), epochs=1)
    said = printed(capsys)
    assert said is None or "pass `batch=(x, y)` to count them" in said
