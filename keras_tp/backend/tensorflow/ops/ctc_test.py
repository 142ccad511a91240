"""The CTC loss of a batch that is split, and a model that learns with it."""

import contextlib

import keras
import numpy as np
import pytest
import tensorflow as tf

from keras_tp import distribution as dist

LOGITS = 3 * np.random.default_rng(0).normal(size=(6, 5, 4)).astype("float32")
# Repeated labels, none, and more than fit into the frames.
LABELS = np.array(
    [[1, 2, 3], [1, 1, 0], [0, 0, 0], [1, 1, 1], [2, 3, 2], [3, 0, 0]], "int32"
)
LABEL_COUNTS = np.array([3, 2, 0, 3, 3, 1], "int32")
FRAME_COUNTS = np.array([5, 4, 3, 4, 2, 0], "int32")


def scope(shape):
    count = shape[0] * shape[1]
    mesh = dist.DeviceMesh(
        shape, ["batch", "model"], dist.list_devices()[:count]
    )
    layout_map = dist.LayoutMap(mesh)
    layout_map[".*up/kernel"] = (None, "model")
    return dist.ModelParallel(layout_map=layout_map, batch_dim_name="batch")


@pytest.mark.parametrize("mask_index", [0, 3])
@pytest.mark.parametrize("dim", [0, 2])
def test_losses_and_gradients(dim, mask_index):
    labels = LABELS
    if mask_index:
        labels = np.where(labels == mask_index, 0, labels)

    def step(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            losses = keras.ops.ctc_loss(
                labels, x, LABEL_COUNTS, FRAME_COUNTS, mask_index=mask_index
            )
            total = tf.reduce_sum(
                losses * (1.0 + np.arange(6, dtype="float32"))
            )
        return losses, tape.gradient(total, x)

    expected = step(tf.constant(LOGITS))
    parallel = scope((1, 2))
    axes = ["model" if d == dim else None for d in range(3)]
    with parallel.scope():
        layout = dist.TensorLayout(axes, parallel.device_mesh)
        x = dist.distribute_tensor(LOGITS, layout)
        found = tf.function(step, autograph=False)(x)
    for got, wanted in zip(found, expected):
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=3e-4)


@pytest.mark.parametrize("jit", [True, False])
def test_a_model_learns_as_on_one_device(jit):
    x = np.random.default_rng(1).normal(size=(6, 5, 3)).astype("float32")

    def train(entered):
        with entered:
            keras.utils.set_random_seed(1)
            model = keras.Sequential(
                [
                    keras.Input((5, 3)),
                    keras.layers.Dense(8, "relu", name="up"),
                    keras.layers.Dense(4),
                ]
            )
            model.compile(
                keras.optimizers.SGD(0.1),
                keras.losses.CTC(),
                run_eagerly=not jit,
            )
            fitted = model.fit(x, LABELS[:, :2], 4, epochs=2, verbose=0)
            return fitted.history["loss"], model.predict(x, verbose=0)

    expected = train(contextlib.nullcontext())
    for got, wanted in zip(train(scope((2, 2)).scope()), expected):
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-6)


def test_shapes_have_to_be_known():
    with scope((1, 2)).scope():
        spec = tf.TensorSpec([6, None, 4])

        def loss(x):
            return keras.ops.ctc_loss(LABELS, x, LABEL_COUNTS, FRAME_COUNTS)

        layout = dist.TensorLayout(
            ["model", None, None], dist.distribution().device_mesh
        )
        x = dist.distribute_tensor(LOGITS, layout)
        with pytest.raises(ValueError, match=r"output with shape=\(6, None, 4"):
            tf.function(loss, [spec], autograph=False)(x)
