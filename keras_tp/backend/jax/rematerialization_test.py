import keras
import numpy as np
import pytest
from jax._src import ad_checkpoint

from keras_tp import distribution as dist


@pytest.fixture
def layers():
    mesh = dist.DeviceMesh((1, 2), ["batch", "model"], dist.list_devices()[:2])
    layout_map = dist.LayoutMap(mesh)
    layout_map["up/kernel"] = (None, "model")
    layout_map["down/kernel"] = ("model", None)
    layout_map["out/kernel"] = (None, "model", None)
    layout_map["last/kernel"] = ("model", None, None)
    with dist.ModelParallel(layout_map=layout_map).scope():
        up = keras.layers.Dense(32, activation="gelu", name="up")
        down = keras.layers.Dense(12, name="down")
        out = keras.layers.EinsumDense("ab,bcd->acd", (4, 6), name="out")
        last = keras.layers.EinsumDense("acd,cde->ae", 10, name="last")
        x = np.ones((3, 16), "float32")
        last(out(down(up(x))))
        yield [up, down, out, last], x


def kept(function, x):
    """Returns the shapes that the backward pass takes from the forward pass."""
    residuals = ad_checkpoint.saved_residuals(function, x)
    return {
        aval.shape for aval, source in residuals if "argument" not in source
    }


def test_only_sums_are_kept(layers):
    (up, down, out, last), x = layers

    def run(x):
        x = keras.ops.sin(down(up(x)))
        return keras.ops.sum(keras.ops.sin(last(out(x))))

    # The input of `gelu` is kept without it.
    assert (3, 32) in kept(run, x)
    found = kept(keras.remat(run), x)
    # The row kernels': of a `Dense`, and of an `EinsumDense`.
    assert {(3, 12), (3, 10)} <= found
    assert (3, 32) not in found


def test_without_a_distribution_nothing_is_kept(layers):
    (up, down, *_), x = layers
    dist.set_distribution(None)

    def run(x):
        return keras.ops.sum(keras.ops.sin(down(up(x))))

    assert not {(3, 32), (3, 12)} & kept(keras.remat(run), x)
