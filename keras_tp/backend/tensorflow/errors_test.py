import keras
import numpy as np
import pytest
import tensorflow as tf

from keras_tp import distribution as dist
from keras_tp.backend.tensorflow import errors


class Softsign(keras.layers.Layer):
    """Has a gradient that DTensor cannot run."""

    def call(self, x):
        return tf.raw_ops.Softsign(features=x)


def test_a_gradient_of_a_custom_loop_is_explained():
    mesh = dist.DeviceMesh((2,), ["model"], dist.list_devices()[:2])
    layout_map = dist.LayoutMap(mesh)
    layout_map[".*up/kernel"] = (None, "model")
    with dist.ModelParallel(layout_map=layout_map).scope():
        model = keras.Sequential(
            [
                keras.Input((6,)),
                keras.layers.Dense(4, use_bias=False, name="up"),
                Softsign(),
            ]
        )
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(model(np.ones((4, 6), "float32")) ** 2)
        with pytest.raises(
            NotImplementedError, match="DTensor cannot run"
        ) as e:
            tape.gradient(loss, [v.value for v in model.trainable_variables])
    assert "Received: " in str(e.value)


@pytest.mark.parametrize(
    "message, operation",
    [
        (
            "loc(fused[\"SplitV:\"]): 'tf.DTensorLayout' op requires dimension "
            "0 to be divisible by sharding specified in DTensorLayout\n"
            'see current operation: %9 = "tf.DTensorLayout"(%8#0)\n'
            "[Op:SplitV] name: split",
            "SplitV",
        ),
        (
            "error: 'tf.StridedSlice' op ComputeLayoutForward error: value "
            "shape is not static",
            "StridedSlice",
        ),
    ],
    ids=lambda text: text.split()[-1],
)
def test_the_operation_is_named(message, operation):
    with pytest.raises(NotImplementedError, match=repr(operation)):
        with errors.explained():
            raise tf.errors.UnknownError(None, None, message)


def test_an_error_of_a_plain_tensor_stays():
    with dist.ModelParallel(
        layout_map=dist.LayoutMap(
            dist.DeviceMesh((2,), ["model"], dist.list_devices()[:2])
        )
    ).scope():
        x = tf.constant([1.0])

        @tf.custom_gradient
        def refused(x):
            def gradient(dy):
                message = "'tf.Thing' op not implemented"
                raise tf.errors.UnknownError(None, None, message)

            return x * 2, gradient

        with tf.GradientTape() as tape:
            tape.watch(x)
            y = refused(x)
        with pytest.raises(tf.errors.UnknownError):
            tape.gradient(y, x)
