import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest

from keras_tp.backend.tensorflow import selfcheck

ROOT = pathlib.Path(__file__).parents[3]


def install(code="import keras_tp; keras_tp.install()", **flags):
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "KERAS_TP_CPU_DEVICES": "2",
    }
    # This process has set them for itself.
    environment.pop(selfcheck.COMBINE_FLAG, None)
    environment.pop(selfcheck.MOVE_FLAG, None)
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**environment, **flags},
        capture_output=True,
        text=True,
        timeout=200,
    )


@pytest.mark.parametrize("flag", [selfcheck.COMBINE_FLAG, selfcheck.MOVE_FLAG])
def test_what_tensorflow_corrupts_is_refused(flag):
    result = install(**{flag: "1"})
    assert result.returncode != 0
    last = [ln for ln in result.stderr.splitlines() if "Error: " in ln][-1]
    for text in ("wrong numbers", f"{flag}=0", "Received"):
        assert text in last


def test_a_flag_that_was_read_before_is_refused():
    """TensorFlow ran a DTensor function before keras_tp was imported."""
    code = (
        "import tensorflow as tf\n"
        "from tensorflow.experimental import dtensor\n"
        "cpu = tf.config.list_physical_devices('CPU')[0]\n"
        "tf.config.set_logical_device_configuration(\n"
        "    cpu, [tf.config.LogicalDeviceConfiguration()] * 2)\n"
        "mesh = dtensor.create_mesh([('x', 2)], devices=['CPU:0', 'CPU:1'])\n"
        "layout = dtensor.Layout(['x'], mesh)\n"
        "x = dtensor.pack([tf.ones(2), tf.ones(2)], layout)\n"
        "tf.function(lambda x: tf.reduce_sum(x) + tf.reduce_sum(x * x))(x)\n"
        "import keras_tp\n"
        "keras_tp.install()\n"
    )
    result = install(code)
    assert result.returncode != 0
    assert "TensorFlow reads it only once" in result.stderr


def test_training_passes_with_the_flag_that_keras_tp_sets():
    code = (
        "import keras_tp\n"
        "from keras_tp.backend.tensorflow import selfcheck\n"
        "keras_tp.install()\n"
        "assert selfcheck._passed == [True]\n"
    )
    result = install(code)
    assert result.returncode == 0, result.stderr


def adam(weight, gradient, m, v):
    m = 0.9 * m + 0.1 * gradient
    v = 0.999 * v + 0.001 * gradient * gradient
    return weight - 0.01 * m / (v**0.5 + 1e-3), m, v


def train_in_numpy():
    rng = np.random.default_rng(0)
    shapes = [(3, 4), (4,), (4, 2), (4, 3), (4, 2)]
    drawn = [rng.standard_normal(shape).astype("float32") for shape in shapes]
    *weights, x, y = [np.asarray(value, "float64") for value in drawn]
    slots = [(0.0, 0.0)] * 3
    losses = []
    for _ in range(selfcheck.STEPS):
        kernel, bias, out = weights
        h = np.tanh(x @ kernel + bias)
        error = h @ out - y
        losses.append(float(np.mean(error**2)))
        d_out = 2 * error / error.size
        d_h = (d_out @ out.T) * (1 - h**2)
        gradients = [x.T @ d_h, d_h.sum(0), h.T @ d_out]
        stepped = [adam(w, g, *s) for w, g, s in zip(weights, gradients, slots)]
        weights = [w for w, _, _ in stepped]
        slots = [(m, v) for _, m, v in stepped]
    return [losses, sum(losses), *weights]


@pytest.mark.parametrize("devices", [["cpu:0"], ["cpu:0", "cpu:1"]])
def test_the_training_of_the_check_is_that_of_adam(devices):
    found, wanted = selfcheck._train_on(devices), train_in_numpy()
    for a, b in zip(found, wanted, strict=True):
        np.testing.assert_allclose(a, b, atol=selfcheck.TOLERANCE)


def test_the_check_runs_once_for_each_process(monkeypatch):
    calls = []
    monkeypatch.setattr(selfcheck, "_passed", [])
    train = selfcheck._train_on
    monkeypatch.setattr(
        selfcheck, "_train_on", lambda d: calls.append(d) or train(d)
    )
    selfcheck.check(["cpu:0", "cpu:1", "cpu:2"])
    selfcheck.check(["cpu:0", "cpu:1"])
    assert calls == [["cpu:0"], ["cpu:0", "cpu:1"]]


@pytest.mark.parametrize("off", [0, 1, 2])
def test_wrong_losses_weights_and_metrics_are_all_found(monkeypatch, off):
    monkeypatch.setattr(selfcheck, "_passed", [])
    train = selfcheck._train_on

    def wrong(devices):
        losses, total, *weights = train(devices)
        if len(devices) == 1:
            return [losses, total, *weights]
        if off == 0:
            losses = [*losses[:-1], losses[-1] + 1e-3]
        elif off == 1:
            total = total * 0
        else:
            weights[1] = weights[1] * float("nan")
        return [losses, total, *weights]

    monkeypatch.setattr(selfcheck, "_train_on", wrong)
    with pytest.raises(RuntimeError, match="wrong numbers"):
        selfcheck.check(["cpu:0", "cpu:1"])
    assert selfcheck._passed == []
