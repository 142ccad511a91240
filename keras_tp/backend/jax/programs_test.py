import argparse
import pathlib

import jax
import keras
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from keras_tp import distribution as dist
from keras_tp.backend.jax import programs

SIZE = 512


@pytest.fixture
def mesh():
    return dist.DeviceMesh((1, 2), ["batch", "model"], dist.list_devices()[:2])


@pytest.fixture
def product(mesh):
    """A product with an all-reduce, and its inputs."""

    def placed(array, *spec):
        return jax.device_put(array, NamedSharding(mesh.backend_mesh, P(*spec)))

    x = placed(np.ones((SIZE, 4 * SIZE), "f"), None, "model")
    w = placed(np.ones((4 * SIZE, SIZE), "f"), "model")
    out = NamedSharding(mesh.backend_mesh, P())
    return jax.jit(lambda x, w: x @ w, out_shardings=out), (x, w)


def launched(function, arguments):
    """Returns the object that JAX launches a compiled program with."""
    return function.lower(*arguments).compile()._executable.unsafe_call


def test_a_program_with_collectives_waits_for_the_one_before(product):
    launch = launched(*product)
    before, ready = [], []

    def original(self, *args):
        ready.extend(result.is_ready() for result in before)
        results = launch(*args)
        before[:] = results
        return results

    call = programs.hook_call(original)
    for _ in range(5):
        call(launch, *product[1])
    assert ready == [True] * 4


def test_what_takes_the_fast_path(product, mesh):
    function, (x, w) = product
    replicated = NamedSharding(mesh.backend_mesh, P())
    taken = programs.hook_fast_path(lambda executable: "fast")

    def takes(function, *arguments):
        executable = function.lower(*arguments).compile()._executable
        return taken(executable) == "fast"

    assert not takes(function, x, w)
    # No collectives.
    assert takes(jax.jit(lambda x: x + 1), x)
    # A train step: it waits for the state of the one before by itself.
    step = jax.jit(
        lambda state, x: (state + x.sum(), state.sum()),
        donate_argnums=0,
        out_shardings=(replicated, replicated),
    )
    assert takes(step, jax.device_put(np.ones(3, "f"), replicated), x)


def test_a_step_of_fit_is_waited_for(mesh):
    with dist.TensorParallel(mesh).scope():
        model = keras.Sequential(
            [keras.Input((8,)), keras.layers.Dense(16), keras.layers.Dense(8)]
        )
        model.compile("sgd", "mse")
        programs._last.clear()
        model.fit(np.ones((4, 8)), np.ones((4, 8)), verbose=0)
        (result,) = programs._last
    assert result.size == 1


def test_few_steps_are_under_way(monkeypatch):
    waited = []
    monkeypatch.setattr(jax, "block_until_ready", waited.extend)
    results = [jax.numpy.ones(1) for _ in range(10)]
    steps = iter(results)
    step = programs.make_function(lambda self: lambda *_: (next(steps), 0), 0)
    for _ in results:
        step(0, None)
    assert [id(x) for x in waited] == [id(x) for x in results[:-4]]


@pytest.mark.slow
def test_many_small_steps_never_hang(mesh, monkeypatch):
    """Without a limit, this hung within a minute three times out of four."""
    benchmarks = pathlib.Path(__file__).parents[3] / "benchmarks"
    monkeypatch.syspath_prepend(str(benchmarks))
    import decoder

    monkeypatch.setattr(decoder, "SEQUENCE_LENGTH", 4)
    monkeypatch.setattr(decoder, "BATCH_SIZE", 2)
    options = argparse.Namespace(
        devices=2, hidden=64, layers=2, jit=False, steps=300
    )
    x, y = decoder.make_data(options)
    with decoder.distribution_of(dist, options).scope():
        model = decoder.build_model(options)
        for _ in range(12):
            decoder.train_epoch(model, x, y)
    assert np.isfinite(decoder.train_epoch(model, x, y))


@pytest.mark.slow
def test_a_backbone_called_eagerly_never_hangs(mesh):
    from keras_hub.models import EfficientNetBackbone

    config = dict(
        stackwise_kernel_sizes=[3, 3, 5, 3, 5, 5, 3],
        stackwise_num_repeats=[1, 2, 2, 3, 3, 4, 1],
        stackwise_input_filters=[32, 16, 24, 40, 80, 112, 192],
        stackwise_output_filters=[16, 24, 40, 80, 112, 192, 320],
        stackwise_expansion_ratios=[1, 6, 6, 6, 6, 6, 6],
        stackwise_strides=[1, 2, 2, 2, 1, 2, 1],
        stackwise_block_types=["v1"] * 7,
        stackwise_squeeze_and_excite_ratios=[0.25] * 7,
        width_coefficient=1.0,
        depth_coefficient=1.0,
    )
    x = np.random.default_rng(0).normal(size=(2, 224, 224, 3)).astype("f")
    reference = EfficientNetBackbone(**config)
    want = np.asarray(reference(x))
    with dist.TensorParallel(mesh).scope():
        model = EfficientNetBackbone(**config)
        model.set_weights(reference.get_weights())
        tolerance = 1e-5 * np.abs(want).max()
        for _ in range(50):
            np.testing.assert_allclose(model(x), want, atol=tolerance)
        np.testing.assert_allclose(
            model.predict(x, verbose=0), want, atol=tolerance
        )
