import keras
import numpy as np
import pytest
from keras import layers
from keras.src.random import seed_generator

import keras_tp
from integration_tests import harness
from keras_tp import distribution as dist

PAIR = {
    ".*up/kernel": (None, "model"),
    ".*up/bias": ("model",),
    ".*down/kernel": ("model", None),
}


def mesh(*shape):
    return harness.mesh(harness.fitted(shape))


def model_parallel(*shape, patterns=PAIR):
    layout_map = dist.LayoutMap(mesh(*shape))
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


def losses(model, optimizer="sgd", **kwargs):
    model.compile(optimizer, "mse", **kwargs)
    return model.fit(*data(), batch_size=4, epochs=2, verbose=0).history["loss"]


def axes_of(model):
    return {
        row.path: row.axes
        for row in dist.describe(model).rows
        if row.role == "weight"
    }


SPLIT = {
    "net/up/kernel": (None, "model"),
    "net/up/bias": ("model",),
    "net/down/kernel": ("model", None),
    "net/down/bias": (None,),
}


def test_keras_classes_are_the_base_classes():
    assert issubclass(dist.DataParallel, keras.distribution.DataParallel)
    assert issubclass(dist.ModelParallel, keras.distribution.ModelParallel)
    distribution = model_parallel(1, 2)
    assert distribution.num_model_replicas == 1
    assert distribution.get_data_layout((8, 3)).axes == ("batch", None)
    assert distribution.get_data_layout(()).axes == ()
    assert f"shape={harness.fitted((1, 2))}" in repr(distribution)


def test_replicas_of_a_two_dimensional_data_parallel_mesh():
    with pytest.warns(UserWarning, match="1D"):
        distribution = dist.DataParallel(device_mesh=mesh(2, 2))
    assert distribution.num_model_replicas == harness.fitted((2, 2))[0]


def test_plain_layout_map_is_taken_over():
    plain_mesh = keras.distribution.DeviceMesh(
        harness.fitted((1, 2)), ["batch", "model"], mesh(1, 2).devices
    )
    plain = keras.distribution.LayoutMap(plain_mesh)
    for pattern, axes in PAIR.items():
        plain[pattern] = axes
    with dist.ModelParallel(layout_map=plain).scope():
        assert axes_of(mlp()) == SPLIT


@pytest.mark.skipif(
    keras.config.backend() == "tensorflow",
    reason="a DTensor layout has one mesh axis for each dim; it is refused",
)
def test_multi_axis_spec_splits_over_the_product():
    patterns = {".*up/kernel": (None, ("batch", "model"))}
    with model_parallel(2, 2, patterns=patterns).scope():
        model = mlp()
    row = dist.describe(model)["net/up/kernel"]
    assert row.axes == (None, ("batch", "model"))
    count = mesh(2, 2).devices.size
    assert set(row.device_bytes.values()) == {6 * 12 * 4 // count}
    assert len(row.device_bytes) == count


# --- a model remembers its distribution --------------------------------------


def test_model_trains_under_its_own_distribution_after_the_scope():
    want = losses(mlp())
    with model_parallel(1, 2).scope():
        model = mlp()
    assert dist.distribution() is None
    np.testing.assert_allclose(losses(model), want, rtol=1e-5)
    assert axes_of(model) == SPLIT
    assert dist.distribution() is None


def test_model_keeps_its_own_distribution_under_another():
    want = losses(mlp())
    with model_parallel(1, 2).scope():
        model = mlp()
    other = dist.DataParallel(devices=dist.list_devices()[:4])
    dist.set_distribution(other)
    np.testing.assert_allclose(losses(model), want, rtol=1e-5)
    assert model.predict(data()[0], verbose=0).shape == (8, 4)
    assert dist.distribution() is other
    row = dist.describe(model)["net/up/kernel"]
    assert sorted(row.device_bytes) == list(mesh(1, 2).devices.flatten())


def test_the_distribution_is_entered_by_every_use_of_the_model(
    tmp_path, monkeypatch
):
    own = model_parallel(1, 2)
    seen = []

    class Probe(layers.Layer):
        def call(self, x):
            seen.append(dist.distribution())
            return x

        def save_own_variables(self, store):
            seen.append(dist.distribution())

    def noted(name):
        """A step as Keras has it, which begins before the model is called."""

        def step(self, *args, **kwargs):
            seen.append(dist.distribution())
            return getattr(keras.Sequential, name)(self, *args, **kwargs)

        return step

    names = ("train_step", "test_step", "predict_step")
    network = type("Network", (keras.Sequential,), {n: noted(n) for n in names})
    monkeypatch.setattr(
        "keras.src.export.export_saved_model",
        lambda *args, **kwargs: seen.append(dist.distribution()),
    )

    with own.scope():
        model = network(
            [keras.Input((6,)), layers.Dense(4, name="up"), Probe()]
        )
    x, y = data()
    model.compile("sgd", "mse", run_eagerly=True)
    uses = [
        lambda: model(x),
        lambda: model.fit(x, y, verbose=0),
        lambda: model.evaluate(x, y, verbose=0),
        lambda: model.predict(x, verbose=0),
        lambda: model.train_on_batch(x, y),
        lambda: model.test_on_batch(x, y),
        lambda: model.predict_on_batch(x),
        lambda: model.stateless_call(
            [v.value for v in model.trainable_variables],
            [v.value for v in model.non_trainable_variables],
            x,
        ),
        lambda: model.save(tmp_path / "model.keras"),
        lambda: model.save_weights(tmp_path / "model.weights.h5"),
    ]
    if keras.config.backend() == "jax":
        # Elsewhere the model is on one device while it is exported.
        uses.append(lambda: model.export(tmp_path / "exported"))
    for use in uses:
        seen.clear()
        use()
        assert seen and set(seen) == {own}
        assert dist.distribution() is None


def test_what_was_made_outside_is_adopted():
    want = losses(
        mlp(), keras.optimizers.Adam(0.01), metrics=[keras.metrics.AUC()]
    )
    optimizer = keras.optimizers.Adam(0.01)
    metric = keras.metrics.AUC()
    with model_parallel(1, 2).scope():
        model = mlp()
    got = losses(model, optimizer, metrics=[metric])
    np.testing.assert_allclose(got, want, rtol=1e-5)
    rows = dist.describe(model).rows
    assert all(row.axes is not None for row in rows)
    assert {row.role for row in rows} == {"weight", "slot", "metric", "seed"}


def test_clear_session_keeps_the_distribution_and_the_model():
    distribution = model_parallel(1, 2)
    dist.set_distribution(distribution)
    model = mlp()
    keras.utils.clear_session()
    assert dist.distribution() is distribution
    keras.backend.clear_session()
    assert dist.distribution() is distribution
    assert len(losses(model)) == 2
    assert axes_of(mlp()) == SPLIT


def test_a_reference_to_clear_session_taken_earlier_keeps_it_too():
    from keras.utils import clear_session

    distribution = model_parallel(1, 2)
    dist.set_distribution(distribution)
    clear_session()
    assert dist.distribution() is distribution
    keras_tp.uninstall()
    clear_session()
    assert dist.distribution() is None


def test_global_random_state_is_not_tied_to_a_mesh():
    keras.utils.set_random_seed(5)
    want = [np.array(keras.random.normal((3,))) for _ in range(2)]
    keras.utils.set_random_seed(5)
    with model_parallel(1, 4).scope():
        first = np.array(keras.random.normal((3,)))
    with model_parallel(1, 2).scope():
        second = np.array(keras.random.normal((3,)))
    np.testing.assert_array_equal([first, second], want)
    assert seed_generator.global_seed_generator().state._layout is None


def test_plain_layers_and_models_are_left_alone():
    want = losses(mlp())
    keras_tp.install()
    model = mlp()
    assert losses(model) == want
    assert all(v._layout is None for v in model.variables)


def test_keras_own_set_distribution_works_once_installed():
    want = losses(mlp())
    keras_tp.install()
    plain_mesh = keras.distribution.DeviceMesh(
        harness.fitted((2, 2)), ["batch", "model"], mesh(2, 2).devices
    )
    layout_map = keras.distribution.LayoutMap(plain_mesh)
    for pattern, axes in PAIR.items():
        layout_map[pattern] = axes
    keras.distribution.set_distribution(
        keras.distribution.ModelParallel(layout_map=layout_map)
    )
    model = mlp()
    keras.distribution.set_distribution(None)
    np.testing.assert_allclose(losses(model), want, rtol=1e-5)
    # What plain Keras cannot: a last batch that does not divide.
    assert model.predict(data(5)[0], batch_size=4, verbose=0).shape == (5, 4)
    assert axes_of(model) == SPLIT


def test_uninstalled_attributes_are_the_originals():
    fit, call = keras.Model.fit, layers.Layer.__call__
    with model_parallel(1, 2).scope():
        assert keras.Model.fit is not fit
    keras_tp.uninstall()
    assert keras.Model.fit is fit
    assert layers.Layer.__call__ is call


# --- tensors -----------------------------------------------------------------


def test_distribute_tensor_checks_rank_and_divisibility():
    layout = dist.TensorLayout((None, "model"), mesh(1, 2))
    value = dist.distribute_tensor(np.ones((3, 4), "float32"), layout)
    assert value.shape == (3, 4)
    with pytest.raises(ValueError, match="rank 1.*its layout rank 2"):
        dist.distribute_tensor(np.ones((4,), "float32"), layout)
    with pytest.raises(ValueError, match="Dim 1.*size 5"):
        dist.distribute_tensor(np.ones((3, 5), "float32"), layout)


def test_output_layout_that_does_not_fit_names_the_layer():
    patterns = {**PAIR, ".*up/output": ("batch", "model", None)}
    with model_parallel(2, 2, patterns=patterns).scope():
        with pytest.raises(ValueError, match="output of 'net/up'"):
            mlp()(data()[0])


def test_output_layout_fits_a_batch_that_does_not_divide():
    to_numpy = keras.ops.convert_to_numpy
    want = to_numpy(mlp()(data(5)[0]))
    patterns = {**PAIR, ".*up/output": ("batch", "model")}
    with model_parallel(2, 2, patterns=patterns).scope():
        model = mlp()
    got = to_numpy(model(data(5)[0]))
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
    assert model.predict(data(5)[0], verbose=0).shape == (5, 4)


def test_initialize_reads_the_environment(monkeypatch):
    from keras_tp.backend import distribution_lib as lib

    calls = []
    monkeypatch.setattr(lib, "initialize", lambda *args: calls.append(args))
    monkeypatch.setenv("KERAS_DISTRIBUTION_JOB_ADDRESSES", "a:1,b:2")
    monkeypatch.setenv("KERAS_DISTRIBUTION_NUM_PROCESSES", "2")
    monkeypatch.setenv("KERAS_DISTRIBUTION_PROCESS_ID", "1")
    dist.initialize()
    dist.initialize("c:3", 3, 0)
    assert calls == [("a:1,b:2", 2, 1), ("c:3", 3, 0)]


def test_installed_hooks_leave_plain_saving_alone(tmp_path):
    model = mlp()
    losses(model, keras.optimizers.Adam(0.01))
    tmp_path = harness.own_folder(tmp_path)
    model.save(tmp_path / "model.keras")
    keras_tp.install()
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert isinstance(loaded.optimizer, keras.optimizers.Adam)
    assert loaded.optimizer.built and loaded.loss == "mse"
