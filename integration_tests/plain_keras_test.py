"""What `docs/keras.md` says of plain Keras is true of the installed one.

A test that fails here says that Keras has changed: correct that page.
"""

import subprocess
import sys

import keras
import numpy as np
import pytest

from integration_tests import harness
from integration_tests import launching

BACKEND = keras.config.backend()
X = np.random.default_rng(0).normal(size=(12, 6)).astype("float32")


def fitted(layer, mode):
    """Trains a layer that is computed again in the backward pass."""
    harness.assert_plain()
    with keras.RematScope(mode=mode):
        inputs = keras.Input((6,))
        model = keras.Model(inputs, layer(inputs))
    model.compile("sgd", "mse")
    model.fit(X, X, batch_size=12, verbose=0)


@pytest.mark.skipif(BACKEND != "jax", reason="of JAX")
@pytest.mark.parametrize(
    "layer", [keras.layers.Dropout, keras.layers.BatchNormalization]
)
def test_jax_cannot_compute_layers_with_state_again(layer):
    layer = layer(0.5) if layer is keras.layers.Dropout else layer()
    with pytest.raises(RuntimeError, match="automatically build"):
        fitted(layer, "full")


@pytest.mark.skipif(BACKEND != "tensorflow", reason="of TensorFlow")
def test_tensorflow_cannot_compute_layers_again():
    with pytest.raises(ValueError, match="keywords arguments only when eager"):
        fitted(keras.layers.Dense(6), "full")


@pytest.mark.skipif(BACKEND != "torch", reason="of torch")
def test_torch_moves_averages_twice():
    averages = []
    for mode in ("activations", "full"):
        layer = keras.layers.BatchNormalization(momentum=0.5)
        fitted(layer, mode)
        averages.append(keras.ops.convert_to_numpy(layer.moving_mean))
    once, again = averages
    np.testing.assert_allclose(once, X.mean(0) / 2, rtol=1e-4, atol=1e-6)
    assert np.abs(again).sum() > 1.4 * np.abs(once).sum()


@pytest.mark.skipif(BACKEND == "jax", reason="JAX reads them in a thread")
def test_numbers_of_each_batch_are_read(logs_read):
    harness.assert_plain()
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(6)])
    model.compile("sgd", "mse")
    model.fit(X, X, batch_size=4, verbose=0)
    assert sum(logs_read) == 3 + 2


def test_h5_takes_the_optimizer_away(tmp_path):
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
    model.compile("adam", "mse")
    model.save(tmp_path / "a.h5")
    model.save(tmp_path / "a.keras")
    loaded = keras.saving.load_model(tmp_path / "a.keras")
    assert isinstance(loaded.optimizer, keras.optimizers.RMSprop)


@pytest.mark.skipif(BACKEND != "jax", reason="alike on torch")
def test_a_save_imports_tensorflow():
    code = (
        "import sys, keras\n"
        "keras.saving.serialize_keras_object(keras.layers.Dense(2))\n"
        "assert 'tensorflow' in sys.modules\n"
    )
    command = [sys.executable, "-c", code]
    subprocess.run(command, env=launching.environment(), check=True)


@pytest.mark.skipif(BACKEND == "torch", reason="a file that torch wrote")
def test_an_optimizer_of_torch_stays_one_on_other_backends():
    code = (
        "import keras\n"
        "config = {'module': 'keras.src.backend.torch.optimizers.torch_sgd', "
        "'class_name': 'SGD', 'config': {}, 'registered_name': 'SGD'}\n"
        "found = keras.saving.deserialize_keras_object(config)\n"
        "assert type(found).__module__ == config['module']\n"
    )
    command = [sys.executable, "-c", code]
    subprocess.run(command, env=launching.environment(), check=True)
