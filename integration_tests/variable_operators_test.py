"""Python's operators on a variable that is split, as layers use them."""

import keras
import numpy as np
import pytest
from keras import layers
from keras import ops

from integration_tests import harness

SHAPE = (4, 8)
EXPRESSIONS = {
    "[None]": lambda v: v[None],
    "[..., None]": lambda v: v[..., None],
    "[:, None]": lambda v: v[:, None],
    "[None, ..., None]": lambda v: v[None, ..., None],
    "[0]": lambda v: v[0],
    "[-1]": lambda v: v[-1],
    "[:, 1]": lambda v: v[:, 1],
    "[1, None, 2:]": lambda v: v[1, None, 2:],
    "[:]": lambda v: v[:],
    "[1:3]": lambda v: v[1:3],
    "[..., -2:]": lambda v: v[..., -2:],
    "[::2]": lambda v: v[::2],
    "+": lambda v: v + 1.0,
    "r+": lambda v: 1.0 + v,
    "-": lambda v: v - v,
    "r-": lambda v: 1.0 - v,
    "*": lambda v: v * v,
    "r*": lambda v: 2.0 * v,
    "/": lambda v: v / 3.0,
    "r/": lambda v: 1.0 / (v * v + 1.0),
    "**": lambda v: v**2,
    "r**": lambda v: 2.0**v,
    "%": lambda v: v % 0.5,
    "//": lambda v: ops.stop_gradient(v // 0.5),
    "@": lambda v: v @ ops.transpose(v),
    "neg": lambda v: -v,
    "abs": abs,
    "pos": lambda v: +v,
    ">": lambda v: ops.cast(v > 0, "float32"),
    "<=": lambda v: ops.cast(v <= 0.1, "float32"),
    "==": lambda v: ops.cast(v == v, "float32"),
    "!=": lambda v: ops.cast(v != v, "float32"),
}


class Operators(layers.Layer):
    """Gives, for each expression, a number times the input."""

    def build(self, _):
        init = keras.initializers.RandomNormal(seed=3)
        self.v = self.add_weight(shape=SHAPE, initializer=init, name="v")

    def call(self, inputs):
        return [
            numbered(expression(self.v)) * inputs
            for expression in EXPRESSIONS.values()
        ]


def numbered(value):
    """Returns a sum to which each element adds another multiple of itself."""
    shape = tuple(value.shape)
    factors = np.arange(1.0, 1 + np.prod(shape), dtype="float32")
    return ops.sum(ops.multiply(value, factors.reshape(shape)))


def train():
    """Returns the outputs before a step and after it, and the weight."""
    x = np.array([[1.0], [2.0], [-1.0], [0.5]], "float32")
    inputs = keras.Input((1,))
    layer = Operators(name="operators")
    model = keras.Model(inputs, layer(inputs))
    count = len(EXPRESSIONS)
    model.compile(keras.optimizers.SGD(1e-6), ["mse"] * count)
    before = model.predict_on_batch(x)
    model.fit(x, [x] * count, batch_size=4, verbose=0)
    assert harness.split_paths(model) or not keras.distribution.distribution()
    after = model.predict_on_batch(x)
    outputs = dict(zip(EXPRESSIONS, zip(before, after)))
    return outputs, keras.ops.convert_to_numpy(layer.v)


@pytest.mark.parametrize("axes", [("model", None), (None, "model")])
def test_operators_of_a_split_variable(axes):
    expected, trained = train()
    layouts = {"operators/v": axes}
    with harness.model_parallel(layouts, harness.fitted((1, 2))).scope():
        found, weight = train()
    for name, arrays in expected.items():
        np.testing.assert_allclose(
            found[name], arrays, rtol=1e-5, atol=1e-5, err_msg=name
        )
    assert np.abs(expected["*"][1] - expected["*"][0]).max() > 1e-3
    np.testing.assert_allclose(weight, trained, rtol=1e-5, atol=1e-6)
