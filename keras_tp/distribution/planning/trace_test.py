import keras
import numpy as np
import pytest
from keras import layers

from keras_tp.distribution.planning import model_inputs
from keras_tp.distribution.planning import trace


def build():
    inputs = keras.Input((None, 6), name="x")
    x = layers.Dense(4, activation="relu", name="up")(inputs)
    return keras.Model(inputs, layers.Dense(2, name="down")(x), name="net")


def test_steps_variables_and_placeholders():
    graph = trace.trace(build())
    kinds = [step.kind for step in graph.steps]
    assert kinds.count("Matmul") == 2 and "ReLU" in kinds
    assert [step.path for step in graph.steps if step.kind == "ReLU"] == ["up"]
    paths = [value.path for value in graph.variables]
    assert paths == ["down/bias", "down/kernel", "up/bias", "up/kernel"]
    used = [value.path for value in graph.in_order_of_use()]
    assert used == ["up/kernel", "up/bias", "down/kernel", "down/bias"]
    (x,), (y,) = graph.inputs, graph.outputs
    assert x.shape == (graph.batch, graph.length, 6)
    assert y.shape == (graph.batch, graph.length, 2)


def test_a_build_leaves_no_trace():
    np.random.seed(3)
    expected = np.random.rand()
    name = layers.Dense(1).name
    keras.utils.clear_session()
    np.random.seed(3)
    graph = trace.trace_build(build)
    assert graph.name == "net" and len(graph.variables) == 4
    assert np.random.rand() == expected
    assert layers.Dense(1).name == name


def test_a_layer_that_cannot_be_traced_is_a_leaf():
    class Opaque(layers.Layer):
        def call(self, x):
            if not isinstance(x, keras.KerasTensor):
                return x
            raise TypeError("needs values")

        def compute_output_spec(self, x):
            return keras.KerasTensor(x.shape, x.dtype)

    inputs = keras.Input((6,))
    model = keras.Model(inputs, Opaque(name="opaque")(inputs))
    graph = trace.trace(model)
    (step,) = [step for step in graph.steps if step.is_leaf]
    assert step.path == "opaque" and "needs values" in graph.leaves["opaque"]


def test_a_model_that_cannot_be_called():
    class Broken(keras.Model):
        def call(self, x):
            raise TypeError("not on these")

    model = Broken()
    model.built = True
    with pytest.raises(model_inputs.NoPlanError, match="not on these"):
        trace.trace(model, (None, 6))
