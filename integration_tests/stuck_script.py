"""A run of two processes in which one fails, or stops, as an argument says.

    python -m keras_tp.launch --devices 2 --processes 2 \
        integration_tests/stuck_script.py kill_callback FOLDER

That is process 1; with `kill_callback_of_0` it is process 0.
"""

import os
import pathlib
import signal
import sys
import time

import keras
import numpy as np
from keras import layers

from keras_tp import distribution as dist
from keras_tp.backend import distribution_lib as lib

WHAT, FOLDER = sys.argv[1], pathlib.Path(sys.argv[2])
INDEX = lib.process_id()
# How a process fails, and where.
FAILING = 0 if WHAT.endswith("_of_0") else 1
HOW, _, WHERE = WHAT.removesuffix("_of_0").partition("_")
BATCHES = 10**6


def fail(where):
    """Fails in one process, if this is the place."""
    if WHERE != where or INDEX != FAILING:
        return
    (FOLDER / "began").touch()
    if HOW == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if HOW == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if HOW == "term":
        os.kill(os.getpid(), signal.SIGTERM)
    if HOW == "raise":
        raise ValueError("the first error")
    if HOW == "memory":
        np.ones((2**20, 2**30))
    if HOW == "exit0":
        sys.exit(0)
    if HOW == "osexit0":
        os._exit(0)
    if HOW == "sleep":
        time.sleep(10**6)
    if HOW == "loop":
        while True:
            pass
    # The launcher, which is the parent, gets a signal.
    signals = {"launcherterm": signal.SIGTERM, "launcherint": signal.SIGINT}
    signals["launcherkill"] = signal.SIGKILL
    if HOW in signals:
        os.kill(os.getppid(), signals[HOW])


def of_host(function):
    """Returns 0, after a function of the host, inside of a step."""
    zero = np.zeros((), "float32")
    if keras.config.backend() == "jax":
        import jax

        return jax.pure_callback(function, zero, zero)
    return float(function(zero))


class Failing(layers.Dense):
    """Fails when it is built, computed the third time or saved the second."""

    saved = called = 0

    def build(self, input_shape):
        fail("build")
        super().build(input_shape)

    def call(self, inputs, training=None):
        if WHERE == "step":
            inputs = inputs + of_host(Failing.count)
        return super().call(inputs, training=training)

    @staticmethod
    def count(zero):
        """A callback of the compiled step; in an eager one, just code."""
        Failing.called += 1
        if Failing.called == 3:
            fail("step")
        return zero

    def save_own_variables(self, store):
        super().save_own_variables(store)
        Failing.saved += 1
        if Failing.saved == 2:
            fail("save")


class Fails(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if batch == 2:
            fail("callback")

    def on_test_batch_end(self, batch, logs=None):
        fail("evaluate")

    def on_predict_batch_end(self, batch, logs=None):
        fail("predict")

    def on_epoch_begin(self, epoch, logs=None):
        if epoch == 1:
            fail("epoch")


def batches(x):
    for batch in range(BATCHES):
        if batch == 3:
            fail("source")
            if HOW == "end" and INDEX == FAILING:
                (FOLDER / "began").touch()
                return
        yield x, x


def main():
    count = len(dist.list_devices())
    mesh = dist.DeviceMesh((1, count), ["batch", "model"])
    layout_map = dist.LayoutMap(mesh)
    layout_map[".*up/kernel"] = (None, "model")
    layout_map[".*down/kernel"] = ("model", None)
    dist.set_distribution(dist.ModelParallel(layout_map=layout_map))
    keras.utils.set_random_seed(1)
    x = np.ones((8, 16), "float32")
    model = keras.Sequential(
        [
            layers.Dense(32, name="up"),
            Failing(16, name="down"),
        ]
    )
    model.compile("sgd", "mse")
    model.fit(x, x, verbose=0)
    model.save(FOLDER / "model.keras")
    # It is saved again, and another process may fail meanwhile.
    model.save(FOLDER / "model.keras")
    fail("script")
    calls = [Fails()]
    if WHERE == "predict":
        model.predict(np.ones((64, 16)), 8, verbose=0, callbacks=calls)
    if WHERE == "evaluate":
        model.evaluate(*[np.ones((64, 16))] * 2, 8, verbose=0, callbacks=calls)
    if WHERE == "epoch":
        model.fit(x, x, epochs=BATCHES, verbose=0, callbacks=calls)
    model.fit(batches(x), steps_per_epoch=None, verbose=0, callbacks=calls)
    if HOW == "end":
        # Fit has to end with an error.
        print("it went on", file=sys.stderr)


main()
