import keras
import numpy as np
import pytest
from keras import layers

from integration_tests import harness
from keras_tp import distribution
from keras_tp.distribution import TensorParallel


def mesh(shape=(1, 2), names=("batch", "model")):
    return harness.mesh(harness.fitted(shape), names)


def build():
    keras.utils.set_random_seed(1)
    inputs = keras.Input((12,))
    bias = keras.initializers.RandomUniform(-0.5, 0.5)
    x = layers.Dense(12, name="first", bias_initializer=bias)(inputs)
    x = layers.LayerNormalization(name="norm")(x)
    x = layers.Dense(16, activation="relu", name="up", bias_initializer=bias)(x)
    x = layers.Dense(5, name="down", bias_initializer=bias)(x)
    return keras.Model(inputs, x, name="mlp")


def data():
    rng = np.random.default_rng(2)
    return (
        rng.standard_normal((4, 12), "float32"),
        rng.standard_normal((4, 5), "float32"),
    )


def train(model):
    x, y = data()
    model.compile(keras.optimizers.SGD(0.1), "mse")
    history = model.fit(x, y, batch_size=4, epochs=3, verbose=0)
    return history.history["loss"], model.get_weights()


def axes(model):
    """Returns the layouts of the weights as the live arrays show them."""
    return {
        row.path: row.axes
        for row in distribution.describe(model).rows
        if row.role == "weight"
    }


PLANNED = {
    "first/kernel": (None, None),
    "first/bias": (None,),
    "norm/gamma": (None,),
    "norm/beta": (None,),
    "up/kernel": (None, "model"),
    "up/bias": ("model",),
    "down/kernel": ("model", None),
    "down/bias": (None,),
}
BORN = {
    "first/kernel": ("model", None),
    "first/bias": ("model",),
    "norm/gamma": ("model",),
    "norm/beta": ("model",),
    "up/kernel": (None, "model"),
    "up/bias": ("model",),
    "down/kernel": ("model", None),
    # 5 does not divide.
    "down/bias": (None,),
}


def assert_same(found, expected):
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-5)
    for value, other in zip(found[1], expected[1]):
        np.testing.assert_allclose(value, other, rtol=1e-5, atol=1e-6)


def test_a_given_plan_is_final_from_birth():
    expected = train(build())
    plan = distribution.plan_sharding(build, mesh())
    with TensorParallel(plan=plan).scope():
        model = build()
        assert axes(model) == PLANNED
        assert_same(train(model), expected)
        assert axes(model) == PLANNED


def test_without_a_plan_variables_are_born_split_and_move_before_compile():
    expected = train(build())
    with TensorParallel(mesh()).scope():
        model = build()
        assert axes(model) == BORN
        before = model.get_weights()
        model.compile("sgd", "mse")
        assert axes(model) == PLANNED
        for value, old in zip(model.get_weights(), before):
            np.testing.assert_array_equal(value, old)
        assert_same(train(model), expected)


@pytest.mark.parametrize("use", ["call", "predict", "save"])
def test_the_first_use_moves(use, tmp_path):
    with TensorParallel(mesh()).scope():
        model = build()
        if use == "call":
            model(data()[0])
        elif use == "predict":
            model.predict(data()[0], verbose=0)
        else:
            model.save(tmp_path / "model.keras")
    assert axes(model) == PLANNED


def test_a_model_around_it_plans_anew():
    def build_inner():
        keras.utils.set_random_seed(1)
        bias = keras.initializers.RandomUniform(-0.5, 0.5)
        dense = layers.Dense(12, name="down", bias_initializer=bias)
        return keras.Sequential([keras.Input((16,)), dense], name="inner")

    def build_around(inner):
        inputs = keras.Input((12,))
        x = layers.Dense(16, activation="relu", name="up")(inputs)
        return keras.Model(inputs, inner(x), name="outer")

    x = data()[0]
    expected = keras.ops.convert_to_numpy(build_around(build_inner())(x))
    with TensorParallel(mesh()).scope():
        inner = build_inner()
        inner.compile("sgd", "mse")
        alone = axes(inner)
        outer = build_around(inner)
        outer.compile("sgd", "mse")
    assert alone == {
        "inner/down/kernel": (None, "model"),
        "inner/down/bias": ("model",),
    }
    # The second of a pair now.
    assert axes(outer) == {
        "up/kernel": (None, "model"),
        "up/bias": ("model",),
        "inner/down/kernel": ("model", None),
        "inner/down/bias": (None,),
    }
    found = keras.ops.convert_to_numpy(outer(x))
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_a_model_that_exists():
    model = build()
    expected = keras.ops.convert_to_numpy(model(data()[0]))
    distribution.distribute_model(model, TensorParallel(mesh()))
    assert axes(model) == PLANNED
    found = keras.ops.convert_to_numpy(model(data()[0]))
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_overrides():
    overrides = {"up/kernel": (None, None), "other/kernel": (None, None)}
    with TensorParallel(mesh(), overrides=overrides).scope():
        model = build()
        model.compile("sgd", "mse")
    assert axes(model)["up/kernel"] == (None, None)


def test_all_devices_are_used_by_default():
    made = TensorParallel()
    assert made.device_mesh.axis_names == ["model"]
    assert made.batch_dim_name is None
    assert made.num_model_replicas == 1
    assert made.get_data_layout((4, 12)).axes == (None, None)


def test_data_and_model_axes():
    expected = train(build())
    with TensorParallel(mesh((2, 2), ("data", "model"))).scope():
        assert distribution.distribution().batch_dim_name == "data"
        model = build()
        assert_same(train(model), expected)
    assert axes(model) == PLANNED


def test_describe_says_why():
    plan = distribution.plan_sharding(build, mesh())
    with plan.distribution().scope():
        report = distribution.describe(build())
    assert "normalized over this dim" in report["first/kernel"].why


def large():
    inputs = keras.Input((512,))
    x = layers.Dense(1024, name="whole")(inputs)
    return keras.Model(inputs, layers.LayerNormalization()(x))


def test_strict():
    plan = distribution.plan_sharding(large, mesh())
    with TensorParallel(plan=plan, strict=True).scope():
        with pytest.raises(ValueError, match="'whole/kernel' of shape"):
            large().compile("sgd", "mse")
    allowed = {"whole/kernel": (None, None)}
    with TensorParallel(mesh(), overrides=allowed, strict=True).scope():
        large().compile("sgd", "mse")


def test_a_model_that_the_plan_is_not_for():
    plan = distribution.plan_sharding(large, mesh())
    with TensorParallel(plan=plan).scope():
        model = build()
        with pytest.warns(UserWarning, match="8 variable.s. of model 'mlp'"):
            model.compile("sgd", "mse")
    with TensorParallel(plan=plan, strict=True).scope():
        with pytest.raises(ValueError, match="are not in the plan"):
            build().compile("sgd", "mse")


def test_bad_arguments():
    plan = distribution.plan_sharding(build, mesh())
    with pytest.raises(ValueError, match="must be a `ShardingPlan`"):
        TensorParallel(plan="plan")
    with pytest.raises(ValueError, match="leave `device_mesh` out"):
        TensorParallel(mesh(), plan=plan)
    with pytest.raises(ValueError, match="`overrides` to `plan_sharding`"):
        TensorParallel(plan=plan, overrides={"up/kernel": (None, None)})
    with pytest.raises(ValueError, match="one of the mesh axes"):
        TensorParallel(mesh(), batch_dim_name="rows")


class Narrow(keras.Model):
    """A model that plans cannot be made for: it takes batches of four."""

    def __init__(self):
        super().__init__()
        self.up = layers.Dense(8, name="up")

    def call(self, x):
        if x.shape[0] != 4:
            raise TypeError("four, please")
        return self.up(x)


def test_without_a_plan_variables_stay_as_they_were_born():
    keras.utils.set_random_seed(1)
    expected = train_narrow(Narrow())
    distribution.set_distribution(TensorParallel(mesh()))
    keras.utils.set_random_seed(1)
    model = Narrow()
    with pytest.warns(UserWarning, match="'narrow.*four, please.*plan_sh"):
        given = train_narrow(model)
    assert harness.difference(given, expected) <= 1e-5
    assert axes(model)[model.up.kernel.path] == ("model", None)


def train_narrow(model):
    rng = np.random.default_rng(2)
    x = rng.standard_normal((4, 12), "float32")
    model.compile(keras.optimizers.SGD(0.1), "mse")
    model.fit(x, x[:, :8], batch_size=4, epochs=3, verbose=0)
    return model.predict(x, batch_size=4, verbose=0)


def test_strict_and_without_a_plan():
    distribution.set_distribution(TensorParallel(mesh(), strict=True))
    with pytest.raises(ValueError, match="four, please"):
        train_narrow(Narrow())


@pytest.mark.parametrize("use", ("save", "predict"))
def test_a_sequential_of_layers_that_were_built(use, tmp_path):
    x = data()[0]
    expected = built_before().predict(x, verbose=0)
    distribution.set_distribution(TensorParallel(mesh()))
    model = built_before()
    if use == "save":
        # It has weights and no inputs: nothing to plan yet.
        model.save(tmp_path / "model.keras")
    given = model.predict(x, verbose=0)
    assert harness.difference(given, expected) <= 1e-5
    assert axes(model)["up/kernel"] == (None, "model")


def built_before():
    keras.utils.set_random_seed(1)
    up = layers.Dense(16, activation="relu", name="up")
    up.build((None, 12))
    up.quantize("int8")
    down = layers.Dense(5, name="down")
    down.build((None, 16))
    down.enable_lora(2)
    return keras.Sequential([up, down])


def test_inputs_that_build_was_given_by_name():
    class Two(keras.Model):
        def __init__(self):
            super().__init__()
            self.up = layers.Dense(8, name="up")
            self.down = layers.Dense(3, name="down")

        def build(self, left_shape, right_shape):
            self.up.build(left_shape)
            self.down.build((*left_shape[:-1], 8))

        def call(self, left, right):
            return self.down(self.up(left)) + right

    model = Two()
    model.build((None, 12), (None, 3))
    plan = distribution.plan_sharding(model, mesh())
    assert plan[model.up.kernel.path].axes == (None, "model")
    assert plan[model.down.kernel.path].axes == ("model", None)


class TwoOfOneName(layers.Layer):
    """As a kernel and its packed values while it is quantized."""

    def build(self, shape):
        self.kernel = self.add_weight((shape[-1], 4, 2), name="kernel")
        self.packed = self.add_weight((shape[-1], 8), name="kernel")

    def call(self, x):
        whole = keras.ops.reshape(self.kernel, (x.shape[-1], 8))
        return keras.ops.matmul(x, whole + self.packed)


def two_of_one_name():
    return keras.Sequential([keras.Input((6,)), TwoOfOneName(name="two")])


@pytest.mark.parametrize("is_given", [False, True])
def test_variables_of_one_path_and_several_shapes_are_whole(is_given):
    parallel = TensorParallel(mesh())
    if is_given:
        plan = distribution.plan_sharding(two_of_one_name, mesh())
        parallel = plan.distribution()
    with parallel.scope():
        model = two_of_one_name()
        model.compile("sgd", "mse")
        x = np.ones((4, 6), "float32")
        model.fit(x, np.ones((4, 8), "float32"), verbose=0)
    kernel, packed = model.weights
    assert kernel.path == packed.path
    assert kernel._layout.axes == (None, None, None)
    assert packed._layout.axes == (None, None)


def test_a_variable_with_a_layout_of_keras():
    class Scaled(layers.Layer):
        def build(self, shape):
            mesh = distribution.distribution().device_mesh
            layout = keras.distribution.TensorLayout((None, None), mesh)
            value = np.ones((1, shape[-1]), "float32")
            self.scale = keras.Variable(value, layout=layout, name="scale")

        def call(self, x):
            return x * self.scale

    devices = distribution.list_devices()[:2]
    mesh = distribution.DeviceMesh((len(devices),), ["model"], devices)
    with distribution.TensorParallel(mesh).scope():
        model = keras.Sequential([keras.Input((4,)), Scaled()])
        model.compile("sgd", "mse")
        model.train_on_batch(np.ones((2, 4)), np.ones((2, 4)))
