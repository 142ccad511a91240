"""Models on several processes: what only torch has, or does its own way."""

import gc
import math

import keras
import numpy as np
import pytest
from keras import layers

if keras.config.backend() != "torch":
    pytest.skip("models on torch", allow_module_level=True)

import torch
from keras.src.saving import saving_lib
from torch.distributed.tensor import DTensor

import keras_tp
from keras_tp import distribution

FEATURES = 12
LAYOUTS = {
    ".*up.*/kernel": (None, "model"),
    ".*up.*/bias": ("model",),
    ".*down.*/kernel": ("model", None),
}


@pytest.fixture(autouse=True)
def reset():
    yield
    distribution.set_distribution(None)
    keras_tp.uninstall()
    keras.utils.clear_session()


def model_parallel(layouts=LAYOUTS):
    count = len(distribution.list_devices())
    if count < 2:
        pytest.skip("needs several processes")
    mesh = distribution.DeviceMesh((1, count), ["batch", "model"])
    layout_map = distribution.LayoutMap(mesh)
    for pattern, axes in layouts.items():
        layout_map[pattern] = axes
    return distribution.ModelParallel(layout_map=layout_map)


def batch(outputs=FEATURES):
    rng = np.random.default_rng(0)
    return (
        rng.standard_normal((8, FEATURES), "float32"),
        rng.standard_normal((8, outputs), "float32"),
    )


def residual(blocks=2):
    keras.utils.set_random_seed(1)
    inputs = keras.Input((FEATURES,))
    x = layers.Dense(FEATURES, name="first")(inputs)
    for index in range(blocks):
        y = layers.LayerNormalization(name=f"norm_{index}")(x)
        y = layers.Dense(16, activation="relu", name=f"up_{index}")(y)
        y = layers.Dense(FEATURES, name=f"down_{index}")(y)
        x = layers.Add(name=f"add_{index}")([x, y])
    model = keras.Model(inputs, x)
    model.compile(keras.optimizers.SGD(0.1), "mse")
    return model


def losses(model, steps=5):
    x, y = batch(model.output_shape[-1])
    return [float(model.train_on_batch(x, y)) for _ in range(steps)]


def test_two_residual_blocks_take_four_all_reduces():
    expected = losses(residual())
    with model_parallel().scope():
        model = residual()
    counts = distribution.count_collectives(model, *batch())
    assert {k: n for k, (n, _) in counts.items() if n} == {"all_reduce": 4}
    np.testing.assert_allclose(losses(model), expected, rtol=1e-5)


def convolutional():
    keras.utils.set_random_seed(1)
    inputs = keras.Input((FEATURES,))
    x = layers.Reshape((3, 4, 1))(inputs)
    x = layers.Conv2D(8, 2, padding="same", name="up_conv")(x)
    x = layers.DepthwiseConv2D(
        2, depth_multiplier=2, padding="same", name="depthwise"
    )(x)
    x = layers.Conv2DTranspose(4, 2, strides=2, name="down_conv")(x)
    x = layers.SeparableConv2D(8, 2, name="separable")(x)
    x = layers.Flatten()(x)
    model = keras.Model(inputs, layers.Dense(FEATURES, name="head")(x))
    model.compile(keras.optimizers.SGD(0.1), "mse")
    return model


def test_depthwise_and_transposed_convolutions():
    expected = losses(convolutional())
    layouts = {
        "up_conv/kernel": (None, None, None, "model"),
        "up_conv/bias": ("model",),
        "depthwise/kernel": (None, None, "model", None),
        "depthwise/bias": ("model",),
        # (height, width, out, in): a row.
        "down_conv/kernel": (None, None, None, "model"),
        "separable/depthwise_kernel": (None, None, "model", None),
        "separable/pointwise_kernel": (None, None, "model", None),
    }
    with model_parallel(layouts).scope():
        model = convolutional()
    np.testing.assert_allclose(losses(model), expected, rtol=1e-5)
    rows = distribution.describe(model).rows
    assert len([r for r in rows if r.is_split]) == len(layouts)


def test_a_training_loop_of_ones_own():
    """Loss, gradients and optimizer outside of any Keras entry point."""

    def train():
        model = residual()
        x, y = batch()
        optimizer = keras.optimizers.Adam(0.01)
        found = []
        for _ in range(3):
            loss = keras.losses.MeanSquaredError()(y, model(x, training=True))
            model.zero_grad()
            loss.backward()
            weights = model.trainable_weights
            with torch.no_grad():
                optimizer.apply([w.value.grad for w in weights], weights)
            found.append(float(loss))
        return found

    expected = train()
    with model_parallel().scope():
        np.testing.assert_allclose(train(), expected, rtol=1e-5)


def test_a_model_that_is_moved_there_and_back():
    expected = losses(residual(), 6)
    model = residual()
    found = losses(model, 2)
    old = [v.value for v in model.weights]
    distribution.distribute_model(model, model_parallel())
    # What torch still holds of the old parameters takes no memory.
    assert not any(tensor.numel() for tensor in old)
    assert distribution.describe(model)["up_0/kernel"].is_split
    held = {id(parameter) for parameter in model.parameters()}
    assert {id(variable.value) for variable in model.weights} <= held
    found += losses(model, 2)
    distribution.distribute_model(
        model, distribution.DataParallel(devices=["cpu:0"])
    )
    assert not any(isinstance(v.value, DTensor) for v in model.weights)
    found += losses(model, 2)
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_values_as_arrays_and_in_plain_variables():
    expected = residual().get_layer("up_0").kernel.numpy()
    plain = keras.Variable(np.zeros((FEATURES, 16)))
    with model_parallel().scope():
        kernel = residual().get_layer("up_0").kernel
        plain.assign(kernel)
    value = kernel.value.detach()
    assert value.placements[0].is_shard()
    np.testing.assert_array_equal(value.numpy(), expected)
    np.testing.assert_array_equal(np.asarray(value), expected)
    assert not isinstance(plain.value, DTensor)
    np.testing.assert_array_equal(plain.numpy(), expected)


def test_a_split_model_is_not_read_into_memory_as_a_file():
    plain = residual()
    with model_parallel().scope():
        split = residual()
        assert saving_lib.is_memory_sufficient(plain)
        assert not saving_lib.is_memory_sufficient(split)


def test_gradients_are_split_as_their_variables():
    with model_parallel().scope():
        model = residual()
    losses(model, 1)
    for variable in model.trainable_variables:
        gradient = variable.value.grad
        assert gradient.placements == variable.value.placements, variable.path


def test_a_slot_is_never_whole(monkeypatch):
    """No tensor of a split variable's full size is made for its slots."""
    with model_parallel().scope():
        model = residual()
        x, y = batch()
        model.compile("adam", "mse")
        made = []
        original = torch.zeros
        monkeypatch.setattr(
            torch,
            "zeros",
            lambda *a, **k: made.append(a) or original(*a, **k),
        )
        model.optimizer.build(model.trainable_variables)
    assert not [a for a in made if math.prod(a[0] or (1,)) >= FEATURES * 16]
    gc.collect()


def test_plain_keras_distribution_works():
    expected = losses(residual())
    keras_tp.install()
    count = len(keras.distribution.list_devices())
    mesh = keras.distribution.DeviceMesh(
        (1, count), ["batch", "model"], keras.distribution.list_devices()
    )
    layout_map = keras.distribution.LayoutMap(mesh)
    for pattern, axes in LAYOUTS.items():
        layout_map[pattern] = axes
    keras.distribution.set_distribution(
        keras.distribution.ModelParallel(
            layout_map=layout_map, batch_dim_name="batch"
        )
    )
    model = residual()
    np.testing.assert_allclose(losses(model), expected, rtol=1e-5)
    if count > 1:
        assert model.get_layer("up_0").kernel.value.placements[0].is_shard()


def test_data_parallel_with_a_last_partial_batch():
    def train():
        keras.utils.set_random_seed(1)
        inputs = keras.Input((FEATURES,))
        x = layers.Dense(16, activation="relu")(inputs)
        x = layers.BatchNormalization()(x)
        x = layers.Dropout(0.3)(x)
        model = keras.Model(inputs, layers.Dense(5)(x))
        model.compile(keras.optimizers.SGD(0.1), "mse", metrics=["mae"])
        rng = np.random.default_rng(0)
        x = rng.standard_normal((11, FEATURES), "float32")
        y = rng.standard_normal((11, 5), "float32")
        history = model.fit(x, y, batch_size=4, epochs=2, verbose=0).history
        predicted = model.predict(x, batch_size=4, verbose=0)
        return history["loss"], history["mae"], predicted

    expected = train()
    with distribution.DataParallel().scope():
        actual = train()
    for a, b in zip(actual, expected):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def test_jit_compile():
    def train(**arguments):
        keras.utils.set_random_seed(1)
        model = residual(1)
        model.compile(keras.optimizers.SGD(0.1), "mse", **arguments)
        return losses(model, 3)

    expected = train()
    with model_parallel().scope():
        np.testing.assert_allclose(train(jit_compile=True), expected, rtol=1e-5)


def test_jit_compile_of_a_model_that_is_not_built():
    # The steps that torch compiles before and after the model is built have
    # outputs that no loss uses.
    class Network(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = keras.layers.Dense(4)

        def call(self, x):
            return self.dense(x)

    def train(**arguments):
        keras.utils.set_random_seed(1)
        model = Network()
        model.compile(keras.optimizers.SGD(0.1), "mse", **arguments)
        x, y = np.ones((20, FEATURES)), np.ones((20, 4))
        history = model.fit(x, y, batch_size=5, epochs=2, verbose=0).history
        return history["loss"]

    expected = train()
    torch._dynamo.reset()
    with distribution.TensorParallel().scope():
        np.testing.assert_allclose(train(jit_compile=True), expected, rtol=1e-5)


def test_jit_compile_does_not_break_the_graph_at_attention():
    def train(**arguments):
        keras.utils.set_random_seed(1)
        inputs = keras.Input((6, FEATURES))
        y = keras.layers.MultiHeadAttention(4, 2)(inputs, inputs)
        model = keras.Model(inputs, keras.layers.Dense(3)(inputs + y))
        model.compile(keras.optimizers.SGD(0.1), "mse", **arguments)
        x, y = np.ones((8, 6, FEATURES)), np.ones((8, 6, 3))
        return model.fit(x, y, batch_size=4, verbose=0).history["loss"]

    expected = train()
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    with distribution.TensorParallel().scope():
        np.testing.assert_allclose(train(jit_compile=True), expected, rtol=1e-5)
    reasons = "\n".join(counters["graph_break"])
    assert "Tensor.backward()" in reasons
    # Attention, what TensorFlow is asked, and a hooked function.
    for name in ("pybind11_object", "executing_eagerly", "matmul"):
        assert name not in reasons


def torch_globals():
    """Everything by which torch and DTensor treat all tensors of a process."""
    dispatcher = DTensor._op_dispatcher
    propagator = dispatcher.sharding_propagator
    tables = {
        f"{owner}.{name}": dict(value)
        for owner, values in (
            ("dispatcher", vars(dispatcher)),
            ("propagator", vars(propagator)),
        )
        for name, value in values.items()
        if isinstance(value, dict)
    }
    return {
        **tables,
        "implicit replication": dispatcher._allow_implicit_replication,
        "attributes": {
            owner: dict(vars(owner))
            for owner in (DTensor, torch.nn.functional, torch.nn.Module)
        },
        "functions": {
            name: value
            for name, value in vars(torch).items()
            if callable(value)
        },
        "function modes": torch._C._len_torch_function_stack(),
        "dispatch modes": torch._C._len_torch_dispatch_stack(),
        "gradients": torch.is_grad_enabled(),
        "dtype": torch.get_default_dtype(),
        "compiler": torch._dynamo.config.automatic_dynamic_shapes,
    }


def test_uninstall_leaves_torch_as_it_was():
    keras_tp.uninstall()
    losses(residual())
    before = torch_globals()
    assert before["dispatcher._custom_op_handlers"]
    assert before["propagator.op_strategy_funcs"]
    with model_parallel().scope():
        assert torch_globals() != before
        model = residual()
        losses(model)
        distribution.count_collectives(model, *batch())
    keras_tp.uninstall()
    after = torch_globals()
    assert after.keys() == before.keys()
    for name, value in before.items():
        assert after[name] == value, name
