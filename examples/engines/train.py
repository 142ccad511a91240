"""Trains a small model in the processes that an engine has started.

mpirun -n 4 python examples/engines/train.py
srun -n 4 python examples/engines/train.py
torchrun --nproc-per-node 4 examples/engines/train.py
"""

import argparse

import keras
import numpy as np

from keras_tp import distribution


def build():
    """Returns a small network, with the same weights in each process."""
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.Input((16,)),
            keras.layers.Dense(32, activation="gelu", name="up"),
            keras.layers.Dense(4, name="down"),
        ]
    )
    model.compile(keras.optimizers.Adam(0.01), "mse")
    return model


def main():
    """Joins the other processes, splits the model over all, and trains it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--backup", help="folder that all processes share")
    options = parser.parse_args()
    distribution.initialize()
    count = distribution.get_device_count()
    replicas = 2 if count % 4 == 0 else 1
    mesh = distribution.DeviceMesh(
        (replicas, count // replicas), ["batch", "model"]
    )
    distribution.set_distribution(distribution.TensorParallel(mesh))
    model = build()
    rng = np.random.default_rng(0)
    x = rng.standard_normal((64, 16), "float32")
    y = x[:, :4] * x[:, 4:8]
    callbacks = []
    if options.backup:
        # A run that starts again goes on with the batch after the last backup.
        backup = f"{options.backup}/run.safetensors"
        callbacks.append(keras.callbacks.BackupAndRestore(backup, save_freq=2))
    found = model.fit(
        *(x, y),
        batch_size=16,
        epochs=options.epochs,
        # Process 0 prints.
        verbose=2,
        callbacks=callbacks,
    )
    # Of all devices, so they are the same in every process.
    print(f"{count} devices, losses {found.history['loss']}")


if __name__ == "__main__":
    main()
