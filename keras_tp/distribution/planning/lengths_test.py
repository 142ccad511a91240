import math

import keras
import pytest
from keras import layers

from keras_tp.distribution.planning import cost
from keras_tp.distribution.planning import trace

LENGTH = 32


def pooled(x):
    return layers.AveragePooling1D(4)(x)


def strided(x):
    return layers.Conv1D(8, 3, strides=2, padding="same")(x)


def strided_inside(x):
    return layers.Conv1D(8, 4, strides=4)(x)


def padded(x):
    """As Whisper does."""
    x = keras.ops.pad(x, ((0, 0), (1, 1), (0, 0)))
    return layers.Conv1D(8, 3, strides=2)(x)


def behind_others(x):
    first = keras.ops.ones_like(x)[:, :1]
    return keras.ops.concatenate([first, x], axis=1)


def without_the_first(x):
    return x[:, 1:] * 2.0


def first_ones(x):
    return x[:, :4] * 2.0


def transposed(x):
    return keras.ops.transpose(layers.Dense(8)(behind_others(x)), (0, 2, 1))


def scores(x):
    x = behind_others(x)
    return keras.ops.matmul(x, keras.ops.transpose(x, (0, 2, 1)))


@pytest.mark.parametrize(
    "function",
    [
        pooled,
        strided,
        strided_inside,
        padded,
        behind_others,
        without_the_first,
        first_ones,
        transposed,
        scores,
    ],
)
def test_bytes_are_those_of_another_length(function):
    x = keras.Input((None, 8))
    model = keras.Model(x, function(x))
    graph = trace.trace(model)
    (output,) = graph.outputs
    expected = model.compute_output_shape((3, LENGTH, 8))
    bytes_of = 4 * expected[0] * expected[1] * expected[2]
    assert cost.size_of(output, graph).at(3, LENGTH) == bytes_of


def beside_another(x):
    """As Gemma 3n does for images."""
    other = keras.ops.zeros((1, 16, 8))
    return keras.ops.concatenate([x, other], axis=0)


def convolved(x):
    return layers.Conv1D(8, 4, strides=4)(beside_another(x))


def without_another(x):
    return beside_another(x)[:-1, :] * 2.0


@pytest.mark.parametrize(
    ("function", "shape"),
    [
        (beside_another, (4, 16, 8)),
        (convolved, (4, 4, 8)),
        (without_another, (3, 16, 8)),
    ],
)
def test_bytes_are_those_of_another_batch(function, shape):
    x = keras.Input((16, 8))
    graph = trace.trace(keras.Model(x, function(x)))
    (output,) = graph.outputs
    assert cost.size_of(output, graph).at(3, None) == 4 * math.prod(shape)
