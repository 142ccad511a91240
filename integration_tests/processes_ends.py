"""A run of two processes that ends as its first argument says."""

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


def model_parallel():
    count = len(dist.list_devices())
    mesh = dist.DeviceMesh((1, count), ["batch", "model"])
    layout_map = dist.LayoutMap(mesh)
    layout_map[".*/kernel"] = (None, "model")
    return dist.ModelParallel(layout_map=layout_map)


class EventfulSaving(layers.Dense):
    """Ends its process, or is slow, when it is saved the second time."""

    saved = 0

    def save_own_variables(self, store):
        super().save_own_variables(store)
        EventfulSaving.saved += 1
        if EventfulSaving.saved < 2:
            return
        if WHAT == f"kill_saving{INDEX}":
            os.kill(os.getpid(), signal.SIGKILL)
        if WHAT == "slow_saving" and INDEX == 0:
            time.sleep(1.2 * float(os.environ["KERAS_TP_TIMEOUT"]))


def main():
    dist.set_distribution(model_parallel())
    keras.utils.set_random_seed(1)
    model = keras.Sequential(
        [
            layers.Input((16,)),
            layers.Dense(32, name="up"),
            EventfulSaving(16, name="down"),
        ]
    )
    model.compile("sgd", "mse")
    x = np.ones((32, 16), "float32")
    model.fit(x, x, verbose=0)
    model.save(FOLDER / "model.keras")
    # What the file has to hold, whatever comes.
    saved = model.get_weights()
    if INDEX == 0:
        np.savez(FOLDER / "saving.npz", *saved)
        (FOLDER / "saving.npz").rename(FOLDER / "saved.npz")
    while not (FOLDER / "saved.npz").exists():
        time.sleep(0.1)
    # What counts as time to end begins here.
    (FOLDER / "began").touch()
    if WHAT == "raise" and INDEX == 1:
        raise ValueError("the first error")
    if WHAT == "exit" and INDEX == 1:
        sys.exit(7)
    if WHAT == "one_saves" and INDEX == 0:
        model.save(FOLDER / "model.keras")
    if WHAT == "one_reads" and INDEX == 0:
        model.get_weights()
    if WHAT.startswith("one_") and INDEX == 1:
        # Process 0 began to wait earlier, so its error is the first.
        time.sleep(5)
    if WHAT == "kill_step" and INDEX == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    model.fit(x, x, verbose=0)
    model.save(FOLDER / "model.keras")
    if WHAT not in ("nothing", "slow_saving"):
        model.fit(x, x, verbose=0, epochs=10**6)


main()
