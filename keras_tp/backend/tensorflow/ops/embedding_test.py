import keras
import numpy as np
import pytest
import tensorflow as tf

from keras_tp import distribution as dist

ROWS = 24


def model_of(run_eagerly):
    devices = dist.list_devices()[:4]
    layout_map = dist.LayoutMap(
        dist.DeviceMesh((1, 4), ["batch", "model"], devices)
    )
    layout_map["tokens/embeddings"] = ("model", None)
    with dist.ModelParallel(layout_map=layout_map).scope():
        inputs = keras.Input((3,), dtype="int32")
        x = keras.layers.Embedding(ROWS, 5, name="tokens")(inputs)
        model = keras.Model(inputs, x)
        model.compile("sgd", "mse", run_eagerly=run_eagerly)
    return model


@pytest.mark.parametrize("run_eagerly", [False, True])
def test_rows_at_the_borders_of_the_shards(run_eagerly):
    model = model_of(run_eagerly)
    (table,) = model.get_weights()
    tokens = np.array([[0, 5, 6], [11, 12, 17], [18, 23, 23]], "int32")
    np.testing.assert_array_equal(model.predict_on_batch(tokens), table[tokens])
    # The gradient of the sum of all squares, over their number.
    model.train_on_batch(tokens, np.zeros((3, 3, 5)))
    uses = np.bincount(tokens.ravel(), minlength=ROWS)[:, None]
    np.testing.assert_allclose(
        model.get_weights()[0], table * (1 - 0.01 * 2 * uses / 45), rtol=1e-6
    )


@pytest.mark.parametrize("token", [ROWS, -ROWS - 1])
def test_a_row_that_no_device_holds_is_refused(token):
    model = model_of(False)
    with pytest.raises(tf.errors.InvalidArgumentError, match="is not in"):
        model.predict_on_batch(np.array([[0, 1, token]], "int32"))
