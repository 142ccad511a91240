import keras
import numpy as np
import pytest
from keras import layers
from keras.src.random import seed_generator

from keras_tp import distribution as dist
from keras_tp.distribution import model_hooks
from keras_tp.distribution.variable_origin import origin_of


@pytest.fixture
def one_device():
    return dist.DataParallel(devices=dist.list_devices()[:1])


class Watched(layers.Layer):
    def call(self, x):
        self.seen = dist.distribution()
        return x


def test_a_model_is_called_under_its_own_distribution(one_device):
    with one_device.scope():
        layer = Watched()
        model = keras.Sequential([keras.Input((3,)), layers.Dense(3), layer])
    layer.seen = None
    model(np.ones((2, 3), "float32"))
    assert layer.seen is one_device
    assert dist.distribution() is None


def test_a_layer_alone_is_called_under_its_own_distribution(one_device):
    with one_device.scope():
        layer = Watched()
    layer(np.ones((2, 3), "float32"))
    assert layer.seen is one_device


def test_users_may_use_the_names_of_our_parameters(one_device):
    class Named(layers.Layer):
        def call(self, x, original=None):
            return x * original

    with one_device.scope():
        assert float(Named()(keras.ops.ones(()), original=3.0)) == 3.0


def test_clear_session_keeps_the_distribution(one_device):
    with one_device.scope():
        keras.utils.clear_session()
        assert dist.distribution() is one_device


def test_global_random_state_outlives_a_distribution(one_device):
    with one_device.scope():
        state = seed_generator.global_seed_generator().state
    assert origin_of(state).distribution is None


def test_functions_are_compiled_again_after_a_layer_has_changed(one_device):
    with one_device.scope():
        model = keras.Sequential([keras.Input((3,)), layers.Dense(2)])
        model.compile("sgd", "mse")
        model.train_function = function = object()
        model_hooks._renew_functions(model)
        assert model.train_function is function
        model.layers[0].enable_lora(1)
        model_hooks._renew_functions(model)
        assert model.train_function is None
        model.train_function = function
        model_hooks._renew_functions(model)
        assert model.train_function is function


@pytest.fixture
def listed(monkeypatch):
    """Names of the functions of `model_state` that walk over a model."""
    found = []

    def noting(original):
        def note(model):
            found.append(original.__name__)
            original(model)

        return note

    for name in ("check_model", "adopt_state"):
        function = noting(getattr(model_hooks, name))
        monkeypatch.setattr(model_hooks, name, function)
    return found


def test_fit_looks_for_state_again_if_it_builds_something(one_device, listed):
    x = np.ones((4, 3), "float32")
    with one_device.scope():
        model = keras.Sequential([layers.Dense(2)])
        model.compile("sgd", "mse", metrics=["mae"])
    model.fit(x, x[:, :2], verbose=0)
    assert listed.count("check_model") >= 2
    assert listed.count("adopt_state") == 2
    del listed[:]
    model.fit(x, x[:, :2], verbose=0)
    assert listed.count("adopt_state") == 1
    if keras.config.backend() == "jax":
        # Elsewhere a step may call the model again, and a call checks it.
        assert "check_model" not in listed


def test_an_optimizer_made_outside_is_adopted_by_a_later_fit(one_device):
    x = np.ones((4, 3), "float32")
    with one_device.scope():
        model = keras.Sequential([keras.Input((3,)), layers.Dense(2)])
        model.compile("sgd", "mse")
    model.fit(x, x[:, :2], verbose=0)
    optimizer = keras.optimizers.SGD(0.1)
    model.compile(optimizer, "mse")
    model.fit(x, x[:, :2], verbose=0)
    assert all(v._layout is not None for v in optimizer.variables)
