import keras
import numpy as np
import pytest
from keras import layers

from integration_tests import harness
from keras_tp import backend
from keras_tp import distribution as dist

PAIR = {
    ".*up/kernel": (None, "model"),
    ".*up/bias": ("model",),
    ".*down/kernel": ("model", None),
}


def model_parallel(*shape, patterns=PAIR):
    layout_map = dist.LayoutMap(harness.mesh(harness.fitted(shape)))
    for pattern, axes in patterns.items():
        layout_map[pattern] = axes
    return dist.ModelParallel(layout_map=layout_map)


def mlp():
    keras.utils.set_random_seed(1)
    return keras.Sequential(
        [
            keras.Input((6,)),
            layers.Dense(12, activation="relu", name="up"),
            layers.Dropout(0.25, name="drop"),
            layers.Dense(4, name="down"),
        ],
        name="net",
    )


def data(count=8):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(count, 6)).astype("float32")
    return x, rng.normal(size=(count, 4)).astype("float32")


def trained(optimizer=None):
    model = mlp()
    optimizer = optimizer or keras.optimizers.Adam(0.01)
    model.compile(optimizer, "mse", metrics=["mae"])
    fit(model)
    return model


def fit(model):
    x, y = data()
    return model.fit(
        x, y, batch_size=4, epochs=2, verbose=0, shuffle=False
    ).history["loss"]


def state(model):
    return [np.array(v) for v in model.variables + model.optimizer.variables]


@harness.shapes((1, 2), (1, 4), (2, 2))
def test_a_trained_model_goes_on_as_on_one_device(shape):
    reference = trained()
    want = fit(reference)
    model = trained()
    before = state(model)
    assert dist.distribute_model(model, model_parallel(*shape)) is model
    for old, new in zip(before, state(model)):
        np.testing.assert_array_equal(old, new)
    report = dist.describe(model)
    n = shape[1]
    for role, count in (("weight", 3), ("slot", 6)):
        split = [r for r in report.rows if r.role == role and r.is_split]
        assert len(split) == count
        for row in split:
            assert set(row.device_bytes.values()) == {row.bytes // n}
    assert all(row.axes is not None for row in report.rows)
    np.testing.assert_allclose(fit(model), want, rtol=1e-5)
    for old, new in zip(reference.get_weights(), model.get_weights()):
        np.testing.assert_allclose(new, old, rtol=1e-4, atol=1e-5)


def test_back_to_one_device():
    reference = trained()
    fit(reference)
    want = fit(reference)
    model = trained()
    dist.distribute_model(model, model_parallel(1, 4))
    fit(model)
    one = dist.DataParallel(devices=["cpu:0"])
    dist.distribute_model(model, one)
    assert list(dist.describe(model).device_bytes) == ["cpu:0"]
    np.testing.assert_allclose(fit(model), want, rtol=1e-5)


def test_the_distribution_that_is_set_is_the_default():
    model = trained()
    distribution = model_parallel(1, 2)
    with distribution.scope():
        dist.distribute_model(model)
        fit(model)
    assert dist.describe(model)["net/up/kernel"].axes == (None, "model")
    fit(model)


def test_without_a_distribution_or_a_built_model():
    with pytest.raises(ValueError, match="DataParallel"):
        dist.distribute_model(mlp())
    model = keras.Sequential([layers.Dense(4)], name="unbuilt")
    with pytest.raises(ValueError, match="'unbuilt'"):
        dist.distribute_model(model, model_parallel(1, 2))


@pytest.mark.parametrize(
    "optimizer",
    [
        keras.optimizers.Adafactor,
        keras.optimizers.Muon,
        keras.optimizers.SGD,
        lambda rate: keras.optimizers.LossScaleOptimizer(
            keras.optimizers.Adam(rate)
        ),
        # Not with use_ema: plain Keras 3.15 on JAX fails in a second fit.
        lambda rate: keras.optimizers.Adam(rate, gradient_accumulation_steps=2),
    ],
)
def test_slots_of_every_kind_follow_their_variable(optimizer):
    reference = trained(optimizer(0.01))
    want = fit(reference)
    model = trained(optimizer(0.01))
    dist.distribute_model(model, model_parallel(1, 2))
    for row in dist.describe(model).rows:
        if row.role == "slot" and row.shape == (6, 12):
            assert row.axes == (None, "model"), row.path
        if row.role == "slot" and row.shape == (12, 4):
            assert row.axes == ("model", None), row.path
    np.testing.assert_allclose(fit(model), want, rtol=1e-4)


def test_square_factors_of_adafactor_keep_their_own_dims():
    def build():
        keras.utils.set_random_seed(2)
        model = keras.Sequential(
            [keras.Input((8,)), layers.Dense(8, name="up")]
        )
        model.compile(keras.optimizers.Adafactor(0.01), "mse")
        x = np.ones((4, 8), "float32")
        model.fit(x, x, verbose=0)
        return model

    moved = dist.distribute_model(build(), model_parallel(1, 2))
    with model_parallel(1, 2).scope():
        born = build()
    for model in (moved, born):
        kernel = model.layers[0].kernel
        index = model.optimizer._get_variable_index(kernel)
        # The row factor has dim 0 of the kernel, the column factor dim 1.
        lib = backend.distribution_lib
        assert lib.variable_axes(model.optimizer._r[index]) == (None,)
        assert lib.variable_axes(model.optimizer._c[index]) == ("model",)


def test_a_layout_that_does_not_fit_is_found_before_anything_moves():
    model = trained()
    before = state(model)
    patterns = {".*up/kernel": (None, "model"), ".*down/bias": ("model", None)}
    with pytest.raises(ValueError, match="net/down/bias"):
        dist.distribute_model(model, model_parallel(1, 2, patterns=patterns))
    assert all(v._layout is None for v in model.variables)
    for old, new in zip(before, state(model)):
        np.testing.assert_array_equal(old, new)
    fit(model)


@pytest.mark.parametrize("first", [None, (1, 2)])
def test_a_failure_midway_leaves_the_model_usable(monkeypatch, first):
    reference = trained()
    want = fit(reference)
    model = trained()
    if first:
        dist.distribute_model(model, model_parallel(*first))
    before = state(model)
    lib = backend.distribution_lib
    relayout, calls = lib.relayout_variable, []

    def failing(variable, layout):
        calls.append(variable.path)
        if len(calls) == 4:
            raise MemoryError("no room")
        relayout(variable, layout)

    monkeypatch.setattr(lib, "relayout_variable", failing)
    with pytest.raises(MemoryError):
        dist.distribute_model(model, model_parallel(2, 2))
    # Three moved, one failed, three went back.
    assert len(calls) == 7
    for old, new in zip(before, state(model)):
        np.testing.assert_array_equal(old, new)
    axes = dist.describe(model)["net/up/kernel"].axes
    assert axes == ((None, "model") if first else None)
    np.testing.assert_allclose(fit(model), want, rtol=1e-5)


def test_a_nested_model_and_a_layer():
    inner = mlp()
    inputs = keras.Input((6,))
    outer = keras.Model(inputs, layers.Dense(2, name="head")(inner(inputs)))
    x = data()[0]
    want = outer.predict(x, verbose=0)
    dist.distribute_model(outer, model_parallel(1, 2))
    np.testing.assert_allclose(outer.predict(x, verbose=0), want, atol=1e-6)
    np.testing.assert_allclose(
        keras.ops.convert_to_numpy(inner(x)),
        inner.predict(x, verbose=0),
        atol=1e-6,
    )
    layer = layers.Dense(4, name="up")
    layer.build((None, 6))
    dist.distribute_model(layer, model_parallel(1, 2))
    assert backend.distribution_lib.variable_axes(layer.kernel) == (
        None,
        "model",
    )
