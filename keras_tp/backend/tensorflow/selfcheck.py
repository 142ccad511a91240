"""Checks a training run and a relayout on two devices against one device.

By default TensorFlow combines the all-reduces of a step, and moves a split from
one dim to another by an all-to-all. The first gives wrong numbers in training.
The second gives wrong numbers in tensors of four or more dims, if neither dim
is the first one. Neither raises an error.
"""

import os

import numpy as np
import tensorflow as tf
from tensorflow.experimental import dtensor

from keras_tp.backend.tensorflow import boundary
from keras_tp.backend.tensorflow import placement

# TensorFlow reads both flags once, when the first DTensor function runs.
COMBINE_FLAG = "DTENSOR_ENABLE_COMBINE_ALL_REDUCES_OPTIMIZATION"
# If it is off, DTensor gathers the tensor and each device keeps its part.
MOVE_FLAG = "DTENSOR_USE_ALL_TO_ALL_RELAYOUT"
STEPS = 3
TOLERANCE = 1e-4

_passed = []


def disable_what_corrupts():
    """Turns off both optimizations, unless the user set their flags."""
    os.environ.setdefault(COMBINE_FLAG, "0")
    os.environ.setdefault(MOVE_FLAG, "0")


def check(devices):
    """Trains a tiny model with Adam and moves a split, once per process.

    Args:
        devices: List of names such as `"cpu:0"`. Uses the first two. With
            fewer than two there is no collective to check.

    Raises:
        RuntimeError: if TensorFlow's numbers are wrong.
    """
    if _passed or len(devices) < 2:
        return
    wanted, found = _train_on(devices[:1]), _train_on(devices[:2])
    wrong = max(map(_difference, found, wanted))
    if not wrong <= TOLERANCE:
        _refuse(
            f"trains on several devices: after {STEPS} steps of Adam the "
            f"weights or losses of a small model are off by {wrong:.2g}. It "
            "combines all-reduces, which corrupts training",
            COMBINE_FLAG,
            f"; losses={found[0]}, correct losses={wanted[0]}",
        )
    if not _moves_right(devices[:2]):
        _refuse(
            "moves the split of a tensor of rank 4 to another dim by an "
            "all-to-all",
            MOVE_FLAG,
        )
    _passed.append(True)


def _refuse(what, flag, received=""):
    raise RuntimeError(
        f"TensorFlow gives wrong numbers when it {what}. Set the environment "
        f"variable {flag}=0 before the process starts; TensorFlow reads it "
        "only once, when the first DTensor function runs, so import and "
        "install keras_tp before you run one. Received: "
        f"{flag}={os.environ.get(flag)!r}{received}"
    )


def _moves_right(devices):
    value = np.arange(2 * 4 * 6 * 8, dtype="float32").reshape(2, 4, 6, 8)
    mesh, axis = _mesh(devices)
    placed = placement.place(value, dtensor.Layout.inner_sharded(mesh, axis, 4))
    specs = [dtensor.UNSHARDED, axis, dtensor.UNSHARDED, dtensor.UNSHARDED]
    moved = dtensor.relayout(placed, dtensor.Layout(specs, mesh))
    return np.array_equal(placement.read(moved), value)


def _mesh(devices):
    axis = "keras_tp_check"
    names = [name.upper() for name in devices]
    return dtensor.create_mesh([(axis, len(names))], devices=names), axis


def _difference(a, b):
    difference = np.abs(np.subtract(a, b, dtype="float64"))
    # A NaN counts as an infinite difference.
    return float(np.max(np.nan_to_num(difference, nan=np.inf)))


def _train_on(devices):
    """Returns the losses, their sum as a metric, and the trained weights."""
    mesh, axis = _mesh(devices)
    rng = np.random.default_rng(0)

    def draw(*shape):
        return rng.standard_normal(shape).astype("float32")

    def variable(value):
        layout = dtensor.Layout.replicated(mesh, np.ndim(value))
        return dtensor.DVariable(placement.place(value, layout))

    def batch(value):
        layout = boundary.batch_layout(value.shape, mesh, axis)
        return placement.place(value, layout)

    with dtensor.default_mesh(mesh):
        weights = [variable(draw(*shape)) for shape in ((3, 4), (4,), (4, 2))]
        slots = [
            [variable(np.zeros(w.shape, "float32")) for _ in range(2)]
            for w in weights
        ]
        total = variable(np.float32(0))

        @tf.function
        def step(x, y):
            kernel, bias, out = weights
            with tf.GradientTape() as tape:
                error = tf.tanh(x @ kernel + bias) @ out - y
                loss = tf.reduce_mean(error**2)
            # A metric that is updated in the same step is all-reduced too.
            total.assign_add(loss)
            gradients = tape.gradient(loss, weights)
            for w, g, (m, v) in zip(weights, gradients, slots):
                m.assign(0.9 * m + 0.1 * g)
                v.assign(0.999 * v + 0.001 * g * g)
                # Read the slots after their assignment, as Keras's optimizers
                # do: combined all-reduces come in the wrong order.
                w.assign_sub(0.01 * m / (tf.sqrt(v) + 1e-3))
            return loss

        x, y = batch(draw(4, 3)), batch(draw(4, 2))
        losses = [float(placement.read(step(x, y))) for _ in range(STEPS)]
    return [losses, *map(placement.read, (total, *weights))]
