"""A SavedModel is that of one device, whatever the model is split over."""

import subprocess
import sys

import keras
import numpy as np
import tensorflow as tf
from keras import layers

from keras_tp import distribution as dist
from keras_tp.backend.tensorflow import distribution_lib as lib

FEATURES = 12
# A batch of another size than the one it was trained with.
SERVED = 3

SPLIT = {
    "images/kernel": (None, None, None, "model"),
    "images/bias": ("model",),
    "up/kernel": (None, "model"),
    "up/bias": ("model",),
    "down/kernel": ("model", None),
}

# What serves a model: it has neither keras_tp nor a mesh, and one device.
SERVE = """
import sys

import numpy as np
import tensorflow as tf

folder, x, outputs = sys.argv[1:]
assert len(tf.config.list_logical_devices()) == 1
served = tf.saved_model.load(folder)
np.savez(
    outputs,
    *[variable.numpy() for variable in served.variables],
    served=served.serve(np.load(x)).numpy(),
    signature=next(
        iter(
            served.signatures["serving_default"](
                tf.constant(np.load(x))
            ).values()
        )
    ).numpy(),
)
assert "keras_tp" not in sys.modules
"""


def network():
    keras.utils.set_random_seed(1)
    inputs = keras.Input((FEATURES,))
    # On a mesh it is made of other operations.
    x = layers.Reshape((3, 2, 2), name="reshape")(inputs)
    x = layers.Conv2D(4, 2, bias_initializer="normal", name="images")(x)
    x = layers.Flatten(name="flatten")(x)
    x = layers.Dense(16, "gelu", bias_initializer="normal", name="up")(x)
    x = layers.BatchNormalization(name="norm")(x)
    x = layers.Dropout(0.5, name="drop")(x)
    x = layers.Dense(5, bias_initializer="normal", name="down")(x)
    model = keras.Model(inputs, x, name="network")
    model.compile("adam", "mse")
    return model


def test_a_process_without_keras_tp_serves_it(tmp_path):
    devices = dist.list_devices()[:2]
    layout_map = dist.LayoutMap(
        dist.DeviceMesh((1, 2), ["batch", "model"], devices)
    )
    for path, axes in SPLIT.items():
        layout_map[path] = axes
    with dist.ModelParallel(layout_map=layout_map).scope():
        model = network()
    rng = np.random.default_rng(3)
    x = rng.standard_normal((8, FEATURES), "float32")
    y = rng.standard_normal((8, 5), "float32")
    model.fit(x, y, epochs=2, verbose=0)
    x = x[:SERVED]
    expected = model.predict(x, verbose=0)
    values = [v.numpy() for v in model.variables]
    np.save(tmp_path / "x.npy", x)

    model.export(tmp_path / "saved", verbose=False)
    subprocess.run(
        [sys.executable, "-c", SERVE, "saved", "x.npy", "outputs.npz"],
        cwd=tmp_path,
        # No more devices than are there.
        env={"TF_CPP_MIN_LOG_LEVEL": "3"},
        check=True,
        timeout=120,
    )
    found = np.load(tmp_path / "outputs.npz")
    np.testing.assert_allclose(found["served"], expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(found["signature"], found["served"])
    # Whole variables, as plain Keras writes them.
    written = [found[name] for name in found.files if name.startswith("arr_")]
    assert len(written) == len(values)
    for array, value in zip(written, values):
        np.testing.assert_array_equal(array, value)

    # The model goes on as it was, and can be exported anew.
    for variable in model.variables:
        assert lib.variable_axes(variable) == SPLIT.get(
            variable.path, (None,) * len(variable.shape)
        )
    np.testing.assert_array_equal(model.predict(x, verbose=0), expected)
    model.fit(np.ones((8, FEATURES)), y, verbose=0)
    after = model.predict(x, verbose=0)
    assert np.abs(after - expected).max() > 1e-4
    model.export(tmp_path / "again", verbose=False)
    again = tf.saved_model.load(str(tmp_path / "again"))
    np.testing.assert_allclose(again.serve(x), after, rtol=1e-5, atol=1e-6)
