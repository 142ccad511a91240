"""Checks a training run and a relayout against known results.

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
    wanted_losses, wanted = _train_in_numpy()
    losses, total, got = _train_on(devices[:2])
    wrong = max(
        [_difference(a, b) for a, b in zip(got, wanted)]
        + [_difference(losses, wanted_losses)]
        + [_difference(total, sum(wanted_losses))]
    )
    if not wrong <= TOLERANCE:
        raise RuntimeError(
            "TensorFlow gives wrong numbers when it trains on several "
            f"devices: after {STEPS} steps of Adam the weights or losses of a "
            f"small model are off by {wrong:.2g}. It combines all-reduces, "
            "which corrupts training. Set the environment variable "
            f"{COMBINE_FLAG}=0 before the process starts; TensorFlow reads it "
            "only once, when the first DTensor function runs, so import and "
            "install keras_tp before you run one. Received: "
            f"{COMBINE_FLAG}={os.environ.get(COMBINE_FLAG)!r}, losses "
            f"{losses} where {wanted_losses} are right"
        )
    if not _moves_right(devices[:2]):
        raise RuntimeError(
            "TensorFlow gives wrong numbers when it splits a tensor of four "
            "dims along another one of them, by an all-to-all. Set the "
            f"environment variable {MOVE_FLAG}=0 before the process starts; "
            "TensorFlow reads it only once. Received: "
            f"{MOVE_FLAG}={os.environ.get(MOVE_FLAG)!r}"
        )
    _passed.append(True)


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


def _problem():
    rng = np.random.default_rng(0)

    def draw(*shape):
        return rng.standard_normal(shape).astype("float32")

    weights = [draw(3, 4), draw(4), draw(4, 2)]
    return weights, draw(4, 3), draw(4, 2)


def _adam(weight, gradient, m, v):
    m = 0.9 * m + 0.1 * gradient
    v = 0.999 * v + 0.001 * gradient * gradient
    return weight - 0.01 * m / (v**0.5 + 1e-3), m, v


def _train_in_numpy():
    weights, x, y = _problem()
    weights = [np.asarray(w, "float64") for w in weights]
    slots = [(0.0, 0.0)] * 3
    losses = []
    for _ in range(STEPS):
        kernel, bias, out = weights
        h = np.tanh(x @ kernel + bias)
        error = h @ out - y
        losses.append(float(np.mean(error**2)))
        d_out = 2 * error / error.size
        d_h = (d_out @ out.T) * (1 - h**2)
        gradients = [x.T @ d_h, d_h.sum(0), h.T @ d_out]
        stepped = [
            _adam(w, g, *s) for w, g, s in zip(weights, gradients, slots)
        ]
        weights = [w for w, _, _ in stepped]
        slots = [(m, v) for _, m, v in stepped]
    return losses, weights


def _train_on(devices):
    weights, x, y = _problem()
    mesh, axis = _mesh(devices)

    def variable(value):
        layout = dtensor.Layout.replicated(mesh, np.ndim(value))
        return dtensor.DVariable(placement.place(value, layout))

    with dtensor.default_mesh(mesh):
        variables = [variable(w) for w in weights]
        slots = [
            (variable(np.zeros_like(w)), variable(np.zeros_like(w)))
            for w in weights
        ]
        total = variable(np.float32(0))

        @tf.function
        def step(x, y):
            kernel, bias, out = variables
            with tf.GradientTape() as tape:
                error = tf.tanh(x @ kernel + bias) @ out - y
                loss = tf.reduce_mean(error**2)
            # A metric that is updated in the same step is all-reduced too.
            total.assign_add(loss)
            gradients = tape.gradient(loss, variables)
            for w, g, (m, v) in zip(variables, gradients, slots):
                m.assign(0.9 * m + 0.1 * g)
                v.assign(0.999 * v + 0.001 * g * g)
                # Read the slots after their assignment, as Keras's optimizers
                # do: combined all-reduces come in the wrong order.
                w.assign_sub(0.01 * m / (tf.sqrt(v) + 1e-3))
            return loss

        batch = [
            placement.place(
                value,
                boundary.batch_layout(value.shape, mesh, axis),
            )
            for value in (x, y)
        ]
        losses = [float(placement.read(step(*batch))) for _ in range(STEPS)]
    return losses, placement.read(total), [placement.read(w) for w in variables]
