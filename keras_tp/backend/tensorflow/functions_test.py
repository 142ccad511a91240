"""Code of a user's own beside a model on a mesh, eager and compiled."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from keras_tp import distribution as dist
from keras_tp.backend.tensorflow import functions
from keras_tp.backend.tensorflow import placement
from keras_tp.testing import uses_test

X = np.arange(12, dtype="float32").reshape(3, 4) / 12


@pytest.fixture
def layer():
    layout_map = dist.LayoutMap(
        dist.DeviceMesh((1, 2), ["batch", "model"], dist.list_devices()[:2])
    )
    layout_map[".*kernel"] = (None, "model")
    with dist.ModelParallel(layout_map=layout_map).scope():
        layer = keras.layers.Dense(6, kernel_regularizer="l2")
        layer.build((None, 4))
        yield layer


# What people do with a weight beside the model.
READS = {
    "array": lambda w: np.asarray(w),
    "add": lambda w: tf.ones((4, 6)) + w,
    "operator": lambda w: w * 2 - np.ones((4, 6), "float32"),
    "tf.matmul": lambda w: tf.matmul(X, w),
    "ops.matmul": lambda w: keras.ops.matmul(X, w),
    "value": lambda w: tf.matmul(X, getattr(w, "_value", w)),
    "transpose": lambda w: keras.ops.transpose(w),
    "raw": lambda w: tf.raw_ops.Square(x=w),
    "slice": lambda w: w[1:, 2],
    "sum": lambda w: tf.constant(1.0) + tf.reduce_sum(w**2),
}


@pytest.mark.parametrize("name", READS)
def test_a_weight_is_read_whole_beside_the_model(layer, name):
    read = READS[name]
    expected = read(tf.Variable(layer.kernel.numpy()))
    got = read(layer.kernel)
    assert not placement.is_dtensor(got)
    np.testing.assert_allclose(got, expected, rtol=1e-6)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "function"])
@pytest.mark.parametrize("by_value", [False, True], ids=["weight", "value"])
def test_gradients_of_a_loss_with_weights_in_it(layer, compiled, by_value):
    if not by_value and not compiled:
        # The tape is asked for the variables of Keras themselves.
        assert layer.kernel.handle is layer.kernel._value.handle

    def loss_of(kernel, bias, outputs, penalty):
        square = tf.reduce_sum(kernel * kernel)
        return tf.reduce_mean(outputs**2) + penalty + 0.1 * square

    def gradients(x):
        weights = layer.trainable_variables
        with tf.GradientTape() as tape:
            loss = loss_of(*weights, layer(x), sum(layer.losses))
        if by_value:
            weights = [w.value for w in weights]
        return loss, tape.gradient(loss, weights)

    run = tf.function(gradients) if compiled else gradients
    kernel = tf.Variable(layer.kernel.numpy())
    bias = tf.Variable(layer.bias.numpy())
    with tf.GradientTape() as tape:
        expected = loss_of(
            kernel,
            bias,
            tf.matmul(X, kernel) + bias,
            0.01 * tf.reduce_sum(kernel**2),
        )
    for _ in range(2):
        loss, got = run(tf.constant(X))
        np.testing.assert_allclose(loss, expected, rtol=1e-6)
    for mine, theirs in zip(got, tape.gradient(expected, [kernel, bias])):
        value = keras.ops.convert_to_numpy(mine)
        np.testing.assert_allclose(value, theirs, rtol=1e-5, atol=1e-7)


def test_a_function_without_weights_stays_off_the_mesh(layer):
    traces = []

    @tf.function
    def step(text, x):
        traces.append(placement.current_mesh())
        return tf.strings.length(text), x * 2

    length, doubled = step(tf.constant(["four"]), tf.constant(X))
    assert not placement.is_dtensor(doubled) and int(length[0]) == 4
    assert traces == [None] and step not in functions._meshes


def test_a_function_that_fails_says_so_itself(layer):
    @tf.function
    def step(x):
        raise KeyError("a mistake of the user's own")

    with pytest.raises(KeyError, match="a mistake of the user's own"):
        step(tf.constant(X))


def network():
    return keras.Sequential(
        [
            keras.Input((4,)),
            keras.layers.Dense(6, activation="relu", name="up"),
            keras.layers.Dense(2, name="down"),
        ]
    )


def split():
    mesh = dist.DeviceMesh((1, 2), ["batch", "model"], dist.list_devices()[:2])
    return dist.TensorParallel(mesh)


def on_one_device_and_split(run):
    """Runs a function twice; returns both results.

    Args:
        run: Callable. It takes a function that makes a model: first on one
            device, then split.
    """

    def make():
        with split().scope():
            return network()

    found = []
    for way in (network, make):
        keras.utils.set_random_seed(1)
        found.append(run(way))
    return found


def mean_absolute_error():
    metric = keras.metrics.MeanAbsoluteError()
    return lambda y, outputs: metric.update_state(y, outputs), metric.result


def counter():
    count = keras.Variable(0.0, name="count")
    return lambda *_: count.assign(count + 1), lambda: count


def generator():
    seeds = keras.random.SeedGenerator(7)
    return lambda *_: keras.random.uniform((), seed=seeds), lambda: seeds.state


# Made outside of the distribution of the model in whose step it changes.
@pytest.mark.parametrize("made", [mean_absolute_error, counter, generator])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "function"])
def test_state_beside_a_model_changes_once_in_a_step(made, compiled):
    def run(make):
        change, read = made()
        model = make()

        def step(x):
            outputs = model(x)
            change(tf.ones_like(outputs), outputs)

        step = tf.function(step) if compiled else step
        for _ in range(3):
            step(tf.constant(X))
        return keras.ops.convert_to_numpy(read())

    expected, found = on_one_device_and_split(run)
    assert np.any(expected)
    np.testing.assert_allclose(found, expected, rtol=1e-6)


OPTIMIZERS = {
    "adam": lambda: keras.optimizers.Adam(0.1),
    "schedule": lambda: keras.optimizers.SGD(
        keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5), 0.9
    ),
    "loss_scale": lambda: keras.optimizers.LossScaleOptimizer(
        keras.optimizers.SGD(0.1)
    ),
    "accumulation": lambda: keras.optimizers.SGD(
        0.1, use_ema=True, gradient_accumulation_steps=2
    ),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("is_built", [False, True], ids=["unbuilt", "built"])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "function"])
def test_an_optimizer_made_outside_of_the_distribution(
    name, is_built, compiled
):
    def run(make):
        optimizer = OPTIMIZERS[name]()
        model = make()
        if is_built:
            optimizer.build(model.trainable_variables)

        def step(x):
            with tf.GradientTape() as tape:
                loss = keras.ops.mean((model(x) - 1) ** 2)
            weights = model.trainable_variables
            optimizer.apply(tape.gradient(loss, weights), weights)
            return loss

        step = tf.function(step) if compiled else step
        losses = [float(step(tf.constant(X))) for _ in range(3)]
        return [*losses, int(optimizer.iterations)]

    expected, found = on_one_device_and_split(run)
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_state_that_a_layer_does_not_track_changes_once_in_fit():
    def run(make):
        count = keras.Variable(0.0, name="count")

        class Counting(keras.layers.Layer):
            def call(self, x):
                count.assign(count + 1)
                return x

        model = make()
        model.add(Counting())
        model.compile("sgd", "mse")
        model.fit(X, np.ones((3, 2)), batch_size=1, epochs=2, verbose=0)
        return float(count)

    expected, found = on_one_device_and_split(run)
    assert found == expected


class Drawing(keras.layers.Layer):
    """Draws without a seed of its own."""

    def call(self, x):
        return x + keras.random.uniform((1, 2))


@pytest.mark.parametrize("use", ["fit", "function"])
def test_the_global_random_state_is_made_in_a_step(use):
    def run(make):
        keras.utils.set_random_seed(5)
        model = make()
        model.add(Drawing())
        if use == "function":
            step = tf.function(lambda x: keras.ops.mean(model(x)))
            return [float(step(tf.constant(X))) for _ in range(3)]
        model.compile("sgd", "mse")
        y = np.ones((3, 2))
        return model.fit(X, y, epochs=3, verbose=0).history["loss"]

    expected, found = on_one_device_and_split(run)
    assert len(set(expected)) == 3
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_a_plain_tf_variable_does_not_change_once_per_device():
    count = tf.Variable(0.0, name="count")
    with split().scope():
        model = network()

    @tf.function
    def step(x):
        count.assign_add(1.0)
        return model(x)

    with pytest.raises(NotImplementedError, match="'count:0'.*keras.Variable"):
        step(tf.constant(X))
    # It does off the mesh.
    count.assign_add(1.0)
    tf.function(lambda: count.assign_add(1.0))()
    assert float(count) == 2


def test_a_generator_does_not_draw_once_per_device():
    draws = tf.random.Generator.from_seed(3)
    with split().scope():
        model = network()

    @tf.function
    def step(x):
        return model(x) + draws.uniform(())

    with pytest.raises(NotImplementedError, match="keras.random.SeedGenerator"):
        step(tf.constant(X))
    draws.uniform(())


@pytest.mark.parametrize("way", ["loop", "next"])
def test_batches_are_drawn_outside_of_a_function(way):
    data = tf.data.Dataset.from_tensor_slices(X).batch(3)
    with split().scope():
        model = network()

    @tf.function
    def step(data):
        if way == "next":
            return tf.reduce_mean(model(next(data)))
        total = 0.0
        for x in data:
            total += tf.reduce_mean(model(x))
        return total

    with pytest.raises(NotImplementedError, match="for batch in dataset"):
        step(iter(data) if way == "next" else data)


def test_a_generator_network_whose_input_is_drawn_in_the_step():
    def run(make):
        seeds = keras.random.SeedGenerator(7)
        makes, judges = make(), make()
        for model, units in ((makes, 4), (judges, 1)):
            model.pop()
            model.pop()
            model.add(keras.layers.Dense(units))
        optimizer = keras.optimizers.Adam(0.1)

        @tf.function
        def step():
            z = keras.random.normal((3, 4), seed=seeds)
            with tf.GradientTape() as tape:
                loss = keras.ops.mean(judges(makes(z)) ** 2)
            weights = makes.trainable_variables
            optimizer.apply(tape.gradient(loss, weights), weights)
            return loss

        return [float(step()) for _ in range(3)]

    expected, found = on_one_device_and_split(run)
    np.testing.assert_allclose(found, expected, rtol=1e-4)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "function"])
def test_a_gradient_of_the_users_own(compiled):
    """An eager loop computes it after it has left the mesh."""

    def run(make):
        model = make()
        model.add(uses_test.Doubled())
        optimizer = keras.optimizers.SGD(0.1)

        def step(x):
            with tf.GradientTape() as tape:
                loss = keras.ops.mean(model(x) ** 2)
            weights = model.trainable_variables
            optimizer.apply(tape.gradient(loss, weights), weights)
            return loss

        step = tf.function(step) if compiled else step
        return [float(step(tf.constant(X))) for _ in range(3)]

    expected, found = on_one_device_and_split(run)
    np.testing.assert_allclose(found, expected, rtol=1e-5)


@pytest.mark.parametrize("dtype", ["bool", "complex64", "float32", "int32"])
@pytest.mark.parametrize("count", [4, 64])
def test_a_constant_that_a_layer_has_made(count, dtype):
    """TensorFlow captures it as a tensor if it is large, or of truth values."""
    table = np.arange(6 * count).reshape(count, 6) % 3

    class Shifted(keras.layers.Layer):
        def build(self, shape):
            self.table = keras.ops.convert_to_tensor(table.astype(dtype))

        def call(self, x):
            shift = tf.math.real(tf.cast(self.table, "complex64"))
            return x + keras.ops.mean(shift)

    def run(make):
        model = make()
        model.add(Shifted())
        model.compile("sgd", "mse")
        fit = model.fit(X, np.ones((3, 2)), epochs=2, verbose=0)
        return fit.history["loss"]

    expected, found = on_one_device_and_split(run)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
