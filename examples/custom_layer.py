"""A layer that is split by hand, and checked against one device.

Its weights have the devices as their first dim, and it says itself what they
send each other. `verify` trains it on one device too and compares.

    python -m keras_tp.launch --devices 4 examples/custom_layer.py
"""

import functools

import keras
import numpy as np
from keras import ops

import keras_tp
from keras_tp.backend import communication

FEATURES, UNITS = 16, 32


class SplitFeedForward(keras.layers.Layer):
    """A feed-forward block of which each device has some units.

    Args:
        devices: Int, number of devices.
    """

    def __init__(self, devices, **kwargs):
        super().__init__(**kwargs)
        self.devices = devices

    def build(self, shape):
        features, units = shape[-1], UNITS // self.devices
        self.up = self.add_weight((self.devices, features, units), name="up")
        self.down = self.add_weight(
            (self.devices, units, features), name="down"
        )

    def call(self, x):
        parts = ops.relu(ops.einsum("bf,nfu->nbu", x, self.up))
        parts = ops.einsum("nbu,nuf->nbf", parts, self.down)
        distribution = keras_tp.distribution.distribution()
        if distribution is None:
            return ops.sum(parts, axis=0)
        # Each device then has the sum over the devices.
        sums = communication.all_reduce(
            parts, distribution.device_mesh, "model"
        )
        return ops.mean(sums, axis=0)


def build(devices):
    """Returns a compiled model; a child process calls this too."""
    inputs = keras.Input((FEATURES,))
    x = keras.layers.Dense(FEATURES, activation="tanh", name="first")(inputs)
    x = SplitFeedForward(devices, name="block")(x)
    model = keras.Model(inputs, keras.layers.Dense(4, name="head")(x))
    model.compile(keras.optimizers.SGD(0.1), "mse")
    return model


def main():
    """Verifies the model on all devices there are."""
    devices = keras_tp.distribution.get_device_count()
    mesh = keras_tp.distribution.DeviceMesh((1, devices), ["batch", "model"])
    layout_map = keras_tp.distribution.LayoutMap(mesh)
    layout_map["block/(up|down)"] = ("model", None, None)
    rng = np.random.default_rng(0)
    report = keras_tp.distribution.verify(
        functools.partial(build, devices),
        keras_tp.distribution.ModelParallel(layout_map=layout_map),
        rng.standard_normal((8, FEATURES), "float32"),
        rng.standard_normal((8, 4), "float32"),
    )
    print(report)
    if not report.passed:
        raise SystemExit(f"It diverges in {report.layer}: {report.where}.")


if __name__ == "__main__":
    main()
