import contextlib
import time

import keras
import numpy as np
import pytest
import tensorflow as tf

from keras_tp import distribution as dist
from keras_tp.backend.tensorflow import boundary
from keras_tp.backend.tensorflow import placement
from keras_tp.backend.tensorflow import training

BATCH = 4
FORBIDDEN = 100.0


class Guarded(keras.Sequential):
    """A model whose step fails on inputs that are too large."""

    def compute_loss(self, x=None, *args, **kwargs):
        loss = super().compute_loss(x, *args, **kwargs)
        largest = tf.reduce_max(tf.cast(x, "float32"))
        guard = tf.debugging.assert_less(largest, FORBIDDEN)
        with tf.control_dependencies([guard]):
            return tf.identity(loss)


def guarded_model(**arguments):
    model = Guarded(
        [
            keras.Input((3,)),
            keras.layers.Dense(4, name="up"),
            keras.layers.Dense(2, name="down"),
        ]
    )
    model.compile(keras.optimizers.SGD(1e-3), "mse", **arguments)
    return model


def split():
    mesh = dist.DeviceMesh((1, 2), ["batch", "model"], dist.list_devices()[:2])
    layout_map = dist.LayoutMap(mesh)
    layout_map[".*up/kernel"] = (None, "model")
    return dist.ModelParallel(layout_map=layout_map, batch_dim_name="batch")


class Drawn:
    """Endless data that counts what is drawn of it.

    Attributes:
        starts: Int, how often it was iterated over from its start.
        batches: Int, how many batches were drawn.
        at_draws: List of what `on_draw` returned at each of them.
    """

    def __init__(self, on_draw=lambda: None):
        self.starts = self.batches = 0
        self.at_draws = []
        self._on_draw = on_draw

    def _generator(self):
        self.starts += 1
        while True:
            self.batches += 1
            self.at_draws.append(self._on_draw())
            yield np.ones((BATCH, 3)), np.ones((BATCH, 2))

    def dataset(self):
        spec = [tf.TensorSpec((None, size), "float32") for size in (3, 2)]
        options = tf.data.Options()
        # TensorFlow draws ahead by itself otherwise.
        options.autotune.enabled = False
        return tf.data.Dataset.from_generator(
            self._generator, output_signature=tuple(spec)
        ).with_options(options)


def batches(x, y):
    return tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH)


@pytest.mark.parametrize("steps_per_execution", [1, 3])
def test_no_more_batches_are_drawn_than_on_one_device(steps_per_execution):
    def draws(scope):
        with scope:
            model = guarded_model(steps_per_execution=steps_per_execution)
            drawn, counts = Drawn(), []
            count = keras.callbacks.LambdaCallback(
                on_train_batch_end=lambda batch, logs: counts.append(
                    drawn.batches
                )
            )
            model.fit(
                drawn.dataset(),
                steps_per_epoch=3,
                epochs=2,
                callbacks=[count],
                verbose=0,
            )
            model.evaluate(drawn.dataset(), steps=2, verbose=0)
            return [drawn.starts, drawn.batches, *counts]

    assert draws(split().scope()) == draws(contextlib.nullcontext())


def test_a_batch_is_drawn_while_the_step_before_it_runs():
    with split().scope():
        model = guarded_model()
        drawn = Drawn(lambda: model in training._running)
        model.fit(drawn.dataset(), steps_per_epoch=3, epochs=2, verbose=0)
    # Each epoch ends when its last step has ended.
    assert drawn.at_draws == [False, True, True] * 2
    assert model not in training._running


def test_to_wait_for_a_step_is_not_to_wait_for_the_next():
    @tf.function
    def short(x):
        return x + 1.0

    @tf.function
    def long(x):
        for _ in range(60):
            x = tf.nn.softmax(x @ x)
        return x

    with split().scope():
        mesh = dist.distribution().device_mesh.backend_mesh
        x = boundary.place_batch(np.ones((512, 512), "float32"), mesh, None)
        with placement.on_mesh(mesh):
            for step in (short, long):
                placement.wait(step(x))
            start = time.perf_counter()
            first, second = short(x), long(x)
            placement.wait({"loss": first})
            waited = time.perf_counter()
            placement.wait(second)
    assert time.perf_counter() - waited > waited - start


@pytest.mark.parametrize("bad_batches", [[0], [1], [3], [1, 2]])
@pytest.mark.parametrize(
    "arguments", [{}, {"steps_per_execution": 2}, {"run_eagerly": True}]
)
def test_the_error_of_any_step_is_raised(bad_batches, arguments):
    x, y = np.ones((4 * BATCH, 3)), np.ones((4 * BATCH, 2))
    bad = np.array(x)
    for batch in bad_batches:
        bad[batch * BATCH] = 2 * FORBIDDEN
    with split().scope():
        model = guarded_model(**arguments)
        for method in (model.fit, model.evaluate):
            with pytest.raises(tf.errors.OpError):
                method(batches(bad, y), verbose=0)
        # The next run is not told of it.
        model.fit(batches(x, y), verbose=0)


def test_the_error_of_a_single_batch_is_raised():
    bad, y = np.full((BATCH, 3), 2 * FORBIDDEN), np.ones((BATCH, 2))
    with split().scope():
        model = guarded_model()
        for method in (model.train_on_batch, model.test_on_batch):
            with pytest.raises(tf.errors.OpError):
                method(bad, y)
        assert isinstance(model.train_on_batch(0 * bad, y), float)


class Guard(keras.layers.Layer):
    """A layer that fails on inputs that are too large."""

    def call(self, x):
        guard = tf.debugging.assert_less(tf.reduce_max(x), FORBIDDEN)
        with tf.control_dependencies([guard]):
            return tf.identity(x)


def model_of_parts(*layers):
    """A model whose outputs lie in parts on the devices."""
    model = keras.Sequential(
        [keras.Input((3,)), *layers, keras.layers.Dense(4, name="up")]
    )
    model.compile("sgd", "mse")
    return model


@pytest.mark.parametrize("bad_batch", [0, 1])
@pytest.mark.parametrize("method", ["predict", "predict_on_batch", "step"])
def test_the_error_of_a_prediction_is_raised_once(method, bad_batch):
    def run(model, x):
        if method == "predict_on_batch":
            return model.predict_on_batch(x)
        if method == "predict":
            return model.predict(x, batch_size=BATCH, verbose=0)
        # A function of the user's own.
        return tf.function(model, autograph=False)(tf.constant(x, "float32"))

    x = np.ones((2 * BATCH, 3))
    bad = np.array(x)
    bad[bad_batch * BATCH] = 2 * FORBIDDEN
    with split().scope():
        model, other = model_of_parts(Guard()), model_of_parts()
        expected = np.asarray(run(other, x))
        for _ in range(2):
            with pytest.raises(tf.errors.InvalidArgumentError):
                run(model, bad)
            # What runs next is not told of it.
            np.testing.assert_array_equal(run(other, x), expected)
            model_of_parts().fit(x, expected, verbose=0)


def test_the_error_is_that_of_the_device_that_failed_first():
    with split().scope():
        mesh = dist.distribution().device_mesh.backend_mesh
        bad = np.full((4, 4), 2 * FORBIDDEN, "float32")
        bad = boundary.place_batch(bad, mesh, None)
        with placement.on_mesh(mesh):
            tf.function(Guard().call, autograph=False)(bad)
        with pytest.raises(tf.errors.InvalidArgumentError, match="assert"):
            with placement._raised_once(mesh):
                raise tf.errors.CancelledError(None, None, "stopped")


def slices(values, rows):
    return tf.IndexedSlices(
        tf.constant(values, "float32"), tf.constant(rows), (5, 2)
    )


@pytest.mark.parametrize("is_sparse", (True, False))
@pytest.mark.parametrize("scaled", (True, False))
def test_gradients_that_are_applied_outside_of_a_step(scaled, is_sparse):
    gradient = slices(np.arange(6).reshape(3, 2), [0, 3, 3])
    gradient = gradient if is_sparse else tf.convert_to_tensor(gradient)

    def train():
        variable = keras.Variable(np.ones((5, 2), "float32"))
        optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
        if scaled:
            optimizer = keras.optimizers.LossScaleOptimizer(optimizer)
        for _ in range(2):
            optimizer.apply([gradient], [variable])
        return keras.ops.convert_to_numpy(variable)

    expected = train()
    with split().scope():
        np.testing.assert_allclose(train(), expected, rtol=1e-6)


def test_a_sparse_batch_is_made_dense_by_rows(monkeypatch):
    mesh = split().device_mesh.backend_mesh
    batch = tf.SparseTensor([[3, 1], [0, 0], [3, 1]], [1.0, 2.0, 4.0], (4, 2))
    placed = boundary.place_batch(batch, mesh, "model")
    sizes = {part.shape for _, _, part in placement.local_parts(placed)}
    assert sizes == {(2, 2)}
    expected = [[2, 0], [0, 0], [0, 0], [0, 5]]
    np.testing.assert_array_equal(placement.read(placed), expected)
    monkeypatch.setattr(boundary, "LARGE_BATCH_BYTES", 10)
    with pytest.warns(UserWarning, match=r"shape \(4, 2\) is made dense"):
        boundary.place_batch(batch, mesh, "model")


class Function(keras.layers.Layer):
    """A layer that is given its function."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def call(self, x):
        return self.function(x)


def after_a_split_layer(function):
    """Returns a model that was called, and the outputs and gradients."""
    keras.utils.set_random_seed(1)
    model = keras.Sequential(
        [keras.layers.Dense(12, name="up"), Function(function)]
    )
    x = np.random.default_rng(0).normal(size=(4, 3)).astype("float32")
    model(x)
    with tf.GradientTape() as tape:
        outputs = model(x)
        loss = tf.reduce_sum(outputs**2)
    gradients = tape.gradient(loss, model.trainable_variables)
    return [keras.ops.convert_to_numpy(x) for x in [outputs, *gradients]]


VALUE = np.linspace(1, 2, 12)


@pytest.mark.parametrize(
    "value",
    (tf.constant(VALUE, "float32"), VALUE, VALUE.tolist()),
    ids=("tensor", "array", "list"),
)
def test_values_of_eager_operations_that_are_not_on_the_mesh(value):
    def function(x):
        parts = tf.concat([x * value, x + value], -1)
        return tf.where(parts > 0, parts, -parts)

    expected = after_a_split_layer(function)
    with split().scope():
        found = after_a_split_layer(function)
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_an_empty_list_is_no_value():
    """`reshape` is given the sizes of a scalar."""
    with split().scope():
        model = keras.Sequential(
            [
                keras.layers.Dense(12, name="up"),
                Function(lambda x: x[:, 0] + tf.reshape(tf.reduce_sum(x), [])),
            ]
        )
        x = np.random.default_rng(0).normal(size=(4, 3)).astype("float32")
        outputs = model(x)
        table = keras.layers.Embedding(5, 3)
        rows = table(np.arange(4))
    assert outputs.shape == (4,) and rows.shape == (4, 3)


def test_the_gradient_of_a_tensor_that_is_not_on_the_mesh():
    scale = tf.constant(VALUE, "float32")

    def gradient():
        keras.utils.set_random_seed(1)
        model = keras.Sequential(
            [
                keras.layers.Dense(12, name="up"),
                Function(lambda x: x * scale),
            ]
        )
        x = np.random.default_rng(0).normal(size=(4, 3)).astype("float32")
        with tf.GradientTape() as tape:
            tape.watch(scale)
            loss = tf.reduce_sum(model(x) ** 2)
        return tape.gradient(loss, scale)

    expected = gradient()
    with split().scope():
        found = gradient()
    assert not placement.is_dtensor(found)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
