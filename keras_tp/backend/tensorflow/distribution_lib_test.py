import types
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.experimental import dtensor

import keras_tp
from keras_tp import distribution as dist
from keras_tp.backend.tensorflow import devices
from keras_tp.backend.tensorflow import distribution_lib as lib
from keras_tp.backend.tensorflow import placement


@pytest.fixture
def mesh():
    return dist.DeviceMesh((2, 2), ["batch", "model"], dist.list_devices()[:4])


def test_devices():
    assert lib.list_devices("cpu") == [f"cpu:{i}" for i in range(8)]
    assert lib.get_device_count() == 8
    with pytest.raises(ValueError, match="'abacus'"):
        lib.list_devices("abacus")


def test_virtual_devices_that_cannot_be_made_any_more(monkeypatch):
    monkeypatch.setenv(devices.CPU_DEVICES, "9")
    with pytest.raises(ValueError, match="with 8 CPU.*before.*9.*launch"):
        lib.list_devices()
    monkeypatch.setenv(devices.CPU_DEVICES, "many")
    with pytest.raises(ValueError, match="number of devices.*'many'"):
        lib.list_devices()


@pytest.mark.parametrize(
    "size, specs",
    [
        (4, ["batch", dtensor.UNSHARDED]),
        (6, ["batch", dtensor.UNSHARDED]),
        (5, [dtensor.UNSHARDED] * 2),
    ],
)
def test_a_batch_that_does_not_divide_is_replicated(mesh, size, specs):
    batch = np.arange(size * 3, dtype="float32").reshape(size, 3)
    layout = dist.TensorLayout(("batch", None), mesh)
    placed = lib.distribute_data_input(batch, layout, "batch")
    np.testing.assert_array_equal(placement.read(placed), batch)
    assert dtensor.fetch_layout(placed).sharding_specs == specs


def test_data_that_is_not_dense_is_refused(mesh):
    layout = dist.TensorLayout(("batch", None), mesh)
    ragged = tf.ragged.constant([[1.0], [2.0, 3.0]])
    with pytest.raises(ValueError, match="to_tensor.*Received"):
        lib.distribute_data_input(ragged, layout, "batch")


def test_a_variable_is_born_split_with_the_values_of_one_device(mesh):
    initializer = keras.initializers.GlorotUniform(seed=3)
    expected = initializer((4, 6)).numpy()
    layout_map = dist.LayoutMap(mesh)
    layout_map[".*kernel"] = (None, "model")
    with dist.ModelParallel(layout_map=layout_map).scope():
        variable = keras.Variable(initializer, (4, 6), name="kernel")
    assert lib.variable_axes(variable) == (None, "model")
    np.testing.assert_array_equal(variable.numpy(), expected)
    np.testing.assert_array_equal(np.asarray(variable), expected)
    np.testing.assert_array_equal(
        keras.ops.convert_to_numpy(variable), expected
    )
    parts = [part for _, _, part in placement.local_parts(variable._value)]
    np.testing.assert_array_equal(parts[0], expected[:, :3])
    np.testing.assert_array_equal(parts[3], expected[:, 3:])


def test_relayout_keeps_the_value_and_frees_the_old_shards(mesh):
    keras_tp.install()
    variable = keras.Variable(np.arange(24.0).reshape(4, 6), dtype="float32")
    old = variable.numpy()
    unique = variable._value._unique_id
    for axes in ((None, "model"), ("model", "batch"), (None, None)):
        lib.relayout_variable(variable, dist.TensorLayout(axes, mesh))
        assert lib.variable_axes(variable) == axes
        parts = 2 ** sum(axis is not None for axis in axes)
        assert lib.variable_bytes_by_device(variable) == {
            f"cpu:{i}": 4 * 6 * 4 // parts for i in range(4)
        }
        np.testing.assert_array_equal(variable.numpy(), old)
    lib.relayout_variable(variable, None)
    assert variable._layout is None
    assert lib.variable_axes(variable) is None
    assert lib.variable_bytes_by_device(variable) == {"cpu:0": 96}
    np.testing.assert_array_equal(variable.numpy(), old)
    # By which an optimizer knows it.
    assert variable._value._unique_id == unique


def test_assigning_keeps_the_layout(mesh):
    keras_tp.install()
    variable = keras.Variable(np.zeros((4, 6)), dtype="float32")
    lib.relayout_variable(variable, dist.TensorLayout(("model", None), mesh))
    value = np.random.default_rng(0).normal(size=(4, 6)).astype("float32")
    variable.assign(value)
    variable.assign_add(np.ones((4, 6)))
    np.testing.assert_allclose(variable.numpy(), value + 1, rtol=1e-6)
    variable.assign_sub(np.full((4, 6), 3.0))
    np.testing.assert_allclose(variable.numpy(), value - 2, rtol=1e-5)
    assert lib.variable_axes(variable) == ("model", None)


def test_what_is_laid_out_is_read_whole(mesh):
    array = np.arange(24, dtype="float32").reshape(4, 6)
    layout = dist.TensorLayout(("batch", "model"), mesh)
    keras_tp.install()
    placed = dist.distribute_tensor(array, layout)
    assert dtensor.fetch_layout(placed).sharding_specs == ["batch", "model"]
    np.testing.assert_array_equal(keras.ops.convert_to_numpy(placed), array)


def test_keras_finds_here_what_its_own_module_lacks():
    """Code that uses `keras.distribution` itself, once it is installed."""
    keras_tp.install()
    api = keras.distribution
    assert api.get_device_count("cpu") == len(dist.list_devices("cpu"))
    devices = dist.list_devices()[:4]
    mesh = api.DeviceMesh((2, 2), ["batch", "model"], devices)
    layout = api.TensorLayout((None, "model"), mesh)
    assert layout.backend_layout.sharding_specs == ["unsharded", "model"]
    array = np.arange(24, dtype="float32").reshape(4, 6)
    placed = api.distribute_tensor(array, layout)
    assert dtensor.fetch_layout(placed) == layout.backend_layout
    np.testing.assert_array_equal(keras.ops.convert_to_numpy(placed), array)
    # Keras asks for these only where there are several processes.
    keras_lib = keras.src.distribution.distribution_lib.distribution_lib
    assert (keras_lib.num_processes(), keras_lib.process_id()) == (1, 0)
    with pytest.raises(ValueError, match="Received"):
        api.initialize("localhost:1", num_processes=2, process_id=0)
    assert keras_lib.num_processes() == 1


def test_a_dim_over_two_mesh_axes_is_refused(mesh):
    layout = dist.TensorLayout((("batch", "model"), None), mesh)
    with pytest.raises(ValueError, match="several mesh axes.*Received"):
        lib._to_backend_layout(layout)
    # Not for want of trying: a spec of DTensor is one name.
    for spec in (("batch", "model"), "batch,model", "batch model"):
        with pytest.raises((TypeError, ValueError, tf.errors.OpError)):
            dtensor.Layout([spec, dtensor.UNSHARDED], mesh.backend_mesh)


def test_jit_compile_is_left_out_with_a_warning(mesh):
    layout_map = dist.LayoutMap(mesh)
    layout_map[".*kernel"] = (None, "model")
    with dist.ModelParallel(layout_map=layout_map).scope():
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(4)])
        model.compile("sgd", "mse", jit_compile=True)
        with pytest.warns(UserWarning, match="XLA.*jit_compile=False"):
            model.fit(np.ones((4, 6)), np.ones((4, 4)), verbose=0)
        # Said once.
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            model.fit(np.ones((4, 6)), np.ones((4, 4)), verbose=0)
            model.evaluate(np.ones((4, 6)), np.ones((4, 4)), verbose=0)


def test_auto_does_not_compile_with_xla_on_a_mesh(mesh, monkeypatch):
    """Keras does where it finds a GPU, and would get the warning above."""
    cpus = tf.config.list_physical_devices()
    gpu = types.SimpleNamespace(device_type="GPU")
    monkeypatch.setattr(
        tf.config,
        "list_physical_devices",
        lambda kind=None: [gpu] if kind is None else cpus,
    )

    def compiled():
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(4)])
        model.compile("sgd", "mse")
        return model.jit_compile

    assert compiled()
    with dist.ModelParallel(layout_map=dist.LayoutMap(mesh)).scope():
        assert not compiled()


def test_an_operation_without_a_rule_is_named_with_its_layer(mesh):
    class Decomposed(keras.layers.Layer):
        def call(self, x):
            square = keras.ops.matmul(keras.ops.transpose(x), x)
            eye = keras.ops.eye(square.shape[-1])
            return keras.ops.cholesky(square + eye)

    layout_map = dist.LayoutMap(mesh)
    layout_map[".*kernel"] = (None, "model")
    with dist.ModelParallel(layout_map=layout_map).scope():
        model = keras.Sequential(
            [
                keras.Input((6,), batch_size=4),
                keras.layers.Dense(4),
                Decomposed(name="decomposed"),
            ]
        )
        with pytest.raises(NotImplementedError) as e:
            model.predict(np.ones((4, 6)), verbose=0)
    for text in ("'Cholesky'", "decomposed", "LayoutMap", "Received"):
        assert text in str(e.value)


def test_a_training_loop_of_ones_own(mesh):
    """Outside of fit, outputs are plain, and gradients find their way."""
    x = np.random.default_rng(0).normal(size=(6, 5)).astype("float32")
    y = np.random.default_rng(1).normal(size=(6, 4)).astype("float32")

    def build():
        keras.utils.set_random_seed(1)
        return keras.Sequential(
            [
                keras.Input((5,)),
                keras.layers.Dense(8, activation="relu", name="up"),
                keras.layers.Dense(4, name="down"),
            ]
        )

    def train(model):
        optimizer = keras.optimizers.Adam(0.01)
        metric = keras.metrics.MeanSquaredError()
        inputs = tf.Variable(x).read_value()
        losses = []
        for _ in range(3):
            with tf.GradientTape() as tape:
                tape.watch(inputs)
                outputs = model(inputs, training=True)
                loss = keras.ops.mean(
                    keras.losses.mean_squared_error(y, outputs)
                )
            weights = model.trainable_variables
            *gradients, d_inputs = tape.gradient(loss, [*weights, inputs])
            optimizer.apply_gradients(zip(gradients, weights))
            metric.update_state(y, outputs)
            losses.append(float(loss))
        values = [keras.ops.convert_to_numpy(w) for w in weights]
        return losses, float(metric.result()), d_inputs.numpy(), values

    expected = train(build())
    layout_map = dist.LayoutMap(mesh)
    layout_map[".*up/kernel"] = (None, "model")
    layout_map[".*down/kernel"] = ("model", None)
    with dist.ModelParallel(layout_map=layout_map).scope():
        model = build()
        got = train(model)
    for a, b in zip(keras.tree.flatten(got), keras.tree.flatten(expected)):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    assert lib.variable_axes(model.layers[0].kernel) == (None, "model")
