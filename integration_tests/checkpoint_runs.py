"""Saves checkpoints to a folder that other runs write to at the same time.

checkpoint_runs.py FOLDER FIRST COUNT

Saves a model of one value, `COUNT` times, from the value `FIRST` on. It loads
the folder after each save: all numbers have to be of one save of some run.
"""

import os
import pathlib
import sys
import time

import keras
import numpy as np

from keras_tp import distribution
from keras_tp.backend import distribution_lib as lib


def network():
    """Returns a model with split kernels."""
    return keras.Sequential(
        [
            keras.Input((256,)),
            keras.layers.Dense(512, use_bias=False, name="up"),
            keras.layers.Dense(256, use_bias=False, name="down"),
        ]
    )


def main(folder, first, count):
    """Saves and loads in turns."""
    folder = pathlib.Path(folder)
    devices = distribution.list_devices()
    mesh = distribution.DeviceMesh(
        (1, len(devices)), ["batch", "model"], devices
    )
    with distribution.TensorParallel(mesh).scope():
        model, other = network(), network()
        # All runs begin together.
        (folder.parent / f"ready-{first}-{lib.process_id()}").touch()
        while (
            len(list(folder.parent.glob("ready-*"))) < 2 * lib.num_processes()
        ):
            time.sleep(0.01)
        for value in range(int(first), int(first) + int(count)):
            for variable in model.weights:
                variable.assign(keras.ops.full(variable.shape, float(value)))
            distribution.save_checkpoint(folder, model)
            distribution.load_checkpoint(folder, other)
            arrays = map(keras.ops.convert_to_numpy, other.weights)
            found = {float(x) for array in arrays for x in np.unique(array)}
            assert len(found) == 1, found
    if lib.process_id() == 0:
        os.write(1, b"saved all\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
