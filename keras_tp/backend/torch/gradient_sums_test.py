"""Gradients of replicas, added up in buckets."""

import os

import keras
import numpy as np
import pytest
from keras import layers

from keras_tp import distribution

if keras.config.backend() != "torch":
    pytest.skip("for torch", allow_module_level=True)
if "RANK" not in os.environ:
    pytest.skip("needs several processes", allow_module_level=True)

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from keras_tp.backend.torch import gradient_sums

WORLD = int(os.environ["WORLD_SIZE"])
WIDTH, DEPTH = 8, 6
# Of a kernel and a bias.
LAYER_SIZE = 4 * (WIDTH * WIDTH + WIDTH)
RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(2, 4 * WORLD, WIDTH)).astype("float32")


class Launches(TorchDispatchMode):
    """Notes in order, for products `"mm"`, for sums the number of tensors."""

    def __init__(self):
        super().__init__()
        self.noted = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        name = func._schema.name.partition("::")[2]
        if name in ("mm", "bmm"):
            self.noted.append("mm")
        elif name.startswith("all_reduce"):
            together = isinstance(args[0], (list, tuple))
            self.noted.append(len(args[0]) if together else 1)
        return func(*args, **(kwargs or {}))

    @property
    def sums(self):
        return [noted for noted in self.noted if noted != "mm"]


def make_model():
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [keras.Input((WIDTH,))]
        + [layers.Dense(WIDTH, "tanh") for _ in range(DEPTH)]
    )
    model.compile(keras.optimizers.SGD(0.1, global_clipnorm=0.5), "mse")
    return model


def loss_of(model, current=None):
    x, y = map(torch.tensor, (X, Y))
    if current is not None:
        layout = current.get_data_layout(X.shape)
        x, y = (distribution.distribute_tensor(t, layout) for t in (x, y))
    return ((model(x) - y) ** 2).sum()


def gradients_of(model):
    return [
        keras.ops.convert_to_numpy(variable.value.grad)
        for variable in model.trainable_variables
    ]


def assert_close(found, expected, factor=1):
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, factor * b, rtol=1e-5, atol=1e-5)


@pytest.fixture
def current():
    parallel = distribution.DataParallel()
    with parallel.scope():
        yield parallel


@pytest.fixture
def expected():
    model = make_model()
    loss_of(model).backward()
    return gradients_of(model)


def test_one_launch(expected, current):
    model = make_model()
    loss = loss_of(model, current)
    with Launches() as launches:
        loss.backward()
    assert launches.sums == [2 * DEPTH]
    assert_close(gradients_of(model), expected)


def test_full_buckets_start_in_the_backward_pass(
    expected, current, monkeypatch
):
    monkeypatch.setattr(gradient_sums, "BUCKET_SIZE", 2 * LAYER_SIZE)
    model = make_model()
    loss = loss_of(model, current)
    with Launches() as launches:
        loss.backward()
    assert launches.sums == [4] * (DEPTH // 2)
    first = launches.noted.index(4)
    # The products of the other layers, two each but for the first layer.
    assert launches.noted[first:].count("mm") >= 2 * (DEPTH - 2) - 1
    assert_close(gradients_of(model), expected)


def test_gradients_that_accumulate(expected, current):
    model = make_model()
    for _ in range(2):
        loss_of(model, current).backward()
    assert_close(gradients_of(model), expected, 2)


def test_gradients_that_are_asked_for(expected, current):
    model = make_model()
    values = [variable.value for variable in model.trainable_variables]
    found = torch.autograd.grad(loss_of(model, current), values)
    assert_close(map(keras.ops.convert_to_numpy, found), expected)
    assert all(value.grad is None for value in values)


def test_after_a_backward_pass_that_failed(expected, current):
    model = make_model()
    with pytest.raises(ZeroDivisionError):
        loss = loss_of(model, current)
        kernel = model.layers[0].kernel.value
        hook = kernel.register_hook(lambda gradient: 1 / 0)
        loss.backward()
    hook.remove()
    assert not gradient_sums._buckets
    model.zero_grad()
    loss_of(model, current).backward()
    assert_close(gradients_of(model), expected)


def test_losses_of_one_process():
    def losses(scope):
        with scope:
            model = make_model()
            history = model.fit(
                X, Y, epochs=3, batch_size=2 * WORLD, shuffle=False, verbose=0
            )
        return history.history["loss"]

    together = losses(distribution.DataParallel().scope())
    alone = losses(distribution.DataParallel(devices=["cpu:0"]).scope())
    np.testing.assert_allclose(together, alone, rtol=1e-6)
