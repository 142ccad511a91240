"""Code of a user's own beside a model on a mesh, eager and compiled."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from keras_tp import distribution as dist
from keras_tp.backend.tensorflow import functions
from keras_tp.backend.tensorflow import placement

X = np.arange(12, dtype="float32").reshape(3, 4) / 12


@pytest.fixture
def layer():
    layout_map = dist.LayoutMap(
        dist.DeviceMesh((1, 2), ["batch", "model"], dist.list_devices()[:2])
    )
    layout_map[".*kernel"] = (None, "model")
    with dist.ModelParallel(layout_map=layout_map).scope():
        layer = keras.layers.Dense(6, kernel_regularizer="l2")
        layer.build((None, 4))
        yield layer


# What people do with a weight beside the model.
READS = {
    "array": lambda w: np.asarray(w),
    "add": lambda w: tf.ones((4, 6)) + w,
    "operator": lambda w: w * 2 - np.ones((4, 6), "float32"),
    "tf.matmul": lambda w: tf.matmul(X, w),
    "ops.matmul": lambda w: keras.ops.matmul(X, w),
    "value": lambda w: tf.matmul(X, getattr(w, "_value", w)),
    "transpose": lambda w: keras.ops.transpose(w),
    "raw": lambda w: tf.raw_ops.Square(x=w),
    "slice": lambda w: w[1:, 2],
    "sum": lambda w: tf.constant(1.0) + tf.reduce_sum(w**2),
}


@pytest.mark.parametrize("name", READS)
def test_a_weight_is_read_whole_beside_the_model(layer, name):
    read = READS[name]
    expected = read(tf.Variable(layer.kernel.numpy()))
    got = read(layer.kernel)
    assert not placement.is_dtensor(got)
    np.testing.assert_allclose(got, expected, rtol=1e-6)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "function"])
@pytest.mark.parametrize("by_value", [False, True], ids=["weight", "value"])
def test_gradients_of_a_loss_with_weights_in_it(layer, compiled, by_value):
    if not by_value and not compiled:
        # The tape is asked for the variables of Keras themselves.
        assert layer.kernel.handle is layer.kernel._value.handle

    def loss_of(kernel, bias, outputs, penalty):
        square = tf.reduce_sum(kernel * kernel)
        return tf.reduce_mean(outputs**2) + penalty + 0.1 * square

    def gradients(x):
        weights = layer.trainable_variables
        with tf.GradientTape() as tape:
            loss = loss_of(*weights, layer(x), sum(layer.losses))
        if by_value:
            weights = [w.value for w in weights]
        return loss, tape.gradient(loss, weights)

    run = tf.function(gradients) if compiled else gradients
    kernel = tf.Variable(layer.kernel.numpy())
    bias = tf.Variable(layer.bias.numpy())
    with tf.GradientTape() as tape:
        expected = loss_of(
            kernel,
            bias,
            tf.matmul(X, kernel) + bias,
            0.01 * tf.reduce_sum(kernel**2),
        )
    for _ in range(2):
        loss, got = run(tf.constant(X))
        np.testing.assert_allclose(loss, expected, rtol=1e-6)
    for mine, theirs in zip(got, tape.gradient(expected, [kernel, bias])):
        value = keras.ops.convert_to_numpy(mine)
        np.testing.assert_allclose(value, theirs, rtol=1e-5, atol=1e-7)


def test_a_function_without_weights_stays_off_the_mesh(layer):
    traces = []

    @tf.function
    def step(text, x):
        traces.append(placement.current_mesh())
        return tf.strings.length(text), x * 2

    length, doubled = step(tf.constant(["four"]), tf.constant(X))
    assert not placement.is_dtensor(doubled) and int(length[0]) == 4
    assert traces == [None] and step not in functions._meshes


def test_a_function_that_fails_says_so_itself(layer):
    @tf.function
    def step(x):
        raise KeyError("a mistake of the user's own")

    with pytest.raises(KeyError, match="a mistake of the user's own"):
        step(tf.constant(X))
