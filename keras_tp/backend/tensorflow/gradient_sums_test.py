import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from integration_tests import harness
from keras_tp import distribution
from keras_tp.backend.tensorflow import gradient_sums
from keras_tp.backend.tensorflow import placement


def added(monkeypatch, names):
    """Returns the names of what each call of `add_n` adds."""
    calls = []

    def add_n(inputs, name=None):
        calls.append([x.name.split(":")[0] for x in inputs])
        return tf.identity(inputs[0], name="sum")

    x = tf.ones((2, 2), name="x")
    made = {
        "matmul": lambda: tf.matmul(x, x, name="matmul"),
        "einsum": lambda: tf.einsum("ab,bc->ac", x, x, name="einsum"),
        "reshaped": lambda: tf.reshape(
            tf.matmul(x, x), (2, 2), name="reshaped"
        ),
        "other": lambda: tf.add(x, x, name="other"),
    }
    gradient_sums.hook_add_n(add_n)([made[name]() for name in names])
    return calls


@pytest.mark.parametrize(
    ["names", "expected"],
    [
        (
            ["other", "matmul", "reshaped"],
            [["matmul", "reshaped"], ["other", "sum"]],
        ),
        (["matmul", "reshaped"], [["matmul", "reshaped"]]),
        (["other", "other", "matmul"], None),
    ],
)
def test_products_first(monkeypatch, names, expected):
    mesh = harness.mesh((1, 2)).backend_mesh
    with tf.Graph().as_default():
        monkeypatch.setattr(placement, "current_mesh", lambda: mesh)
        found = added(monkeypatch, names)
    assert found == expected if expected else len(found) == 1


def test_as_before_without_a_mesh(monkeypatch):
    assert distribution.distribution() is None
    with tf.Graph().as_default():
        found = added(monkeypatch, ["other", "matmul", "matmul"])
    assert len(found) == 1


def test_a_whole_kernel_beside_two_split_ones():
    """As the router of experts: its gradient is no sum over the devices."""
    layout_map = distribution.LayoutMap(harness.mesh((1, 2)))
    layout_map["(gate|up)/kernel"] = (None, "model")
    layout_map["down/kernel"] = ("model", None)
    with distribution.ModelParallel(layout_map=layout_map).scope():
        tokens = keras.Input((6,), dtype="int32")
        x = layers.Embedding(24, 10, name="tokens")(tokens)
        gate, up, router = (
            layers.Dense(units, use_bias=False, name=name)(x)
            for name, units in (("gate", 8), ("up", 8), ("router", 10))
        )
        y = layers.Dense(10, use_bias=False, name="down")(gate * up)
        model = keras.Model(tokens, y + router)
        model.compile("sgd", "mse")
    x = np.arange(24, dtype="int32").reshape(4, 6)
    found = distribution.count_collectives(model, x, np.ones((4, 6, 10)))
    # The output of the pair, and the gradient of its input.
    assert found["all_reduce"] == (2, 2 * 4 * 6 * 10 * 4)
