"""Everything one does with a Keras model, on a mesh as on one device."""

import json
import math
import os

import keras
import numpy as np
import pytest
from keras import layers
from keras import ops

import keras_tp
from integration_tests import harness
from integration_tests import zoo
from keras_tp import distribution

FEATURES = 12
CLASSES = 5
SAMPLES = 11
# Of 11 samples two batches of 4 and one of 3, which two devices cannot share.
BATCH = 4

LAYOUTS = {
    ".*up/kernel": (None, "model"),
    ".*up/bias": ("model",),
    ".*down/kernel": ("model", None),
}
SPLIT = {"up/kernel", "up/bias", "down/kernel"}


def samples(count=SAMPLES):
    rng = np.random.default_rng(5)
    x = rng.standard_normal((count, FEATURES), "float32")
    return x, rng.integers(0, CLASSES, (count,)).astype("int32")


def network(**compile_arguments):
    """A classifier; compiled with Adam unless told otherwise."""
    inputs = keras.Input((FEATURES,))
    x = zoo.dense(16, "up", activation="relu")(inputs)
    model = keras.Model(inputs, zoo.dense(CLASSES, "down")(x), name="network")
    return compiled(model, **compile_arguments)


def compiled(model, **arguments):
    arguments = {
        "optimizer": keras.optimizers.Adam(0.01),
        "loss": keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        "metrics": ["accuracy"],
        **arguments,
    }
    model.compile(**arguments)
    return model


def compare(work, layouts=LAYOUTS, split=SPLIT, shape=(2, 2), tolerance=1e-5):
    """Does the same on one device and on a mesh, and compares what it gives.

    Args:
        work: Callable that returns the model, and a dict of numbers and
            arrays. The weights are compared too.
        split: Set of the paths that have to be split in the end.
    """

    def run():
        keras.utils.clear_session()
        keras.utils.set_random_seed(1)
        model, found = work()
        return model, {**found, **harness.weights_of(model)}

    keras_tp.uninstall()
    harness.assert_plain()
    _, expected = run()
    shape = harness.fitted(shape)
    parallel = harness.model_parallel(layouts, shape)
    with parallel.scope():
        model, actual = run()
    assert harness.split_paths(model) == set(split)
    assert actual.keys() == expected.keys()
    for name, value in actual.items():
        np.testing.assert_allclose(
            np.asarray(value, "float32"),
            np.asarray(expected[name], "float32"),
            rtol=tolerance,
            atol=tolerance,
            err_msg=name,
        )
    return model


def fit(model, x=None, y=None, **arguments):
    arguments = {
        "epochs": 2,
        "batch_size": BATCH,
        "shuffle": False,
        "verbose": 0,
        **arguments,
    }
    if x is None:
        x, y = samples()
    return model.fit(x, y, **arguments).history


def test_a_last_partial_batch():
    def work():
        x, y = samples()
        model = network()
        found = {f"fit_{k}": v for k, v in fit(model, x, y).items()}
        found["evaluate"] = model.evaluate(x, y, batch_size=BATCH, verbose=0)
        found["predict"] = model.predict(x, batch_size=BATCH, verbose=0)
        assert found["predict"].shape == (SAMPLES, CLASSES)
        found["train"] = model.train_on_batch(x[:5], y[:5])
        found["test"] = model.test_on_batch(x[:5], y[:5])
        found["one"] = model.test_on_batch(x[:1], y[:1])
        found["predict_on_batch"] = model.predict_on_batch(x[:5])
        found["call"] = ops.convert_to_numpy(model(x[:5]))
        return model, found

    compare(work)


def test_shuffled_batches():
    """Shuffling draws on the seed, not on the devices."""

    def work():
        model = network()
        return model, fit(model, shuffle=True)

    compare(work)


def test_sample_weight_class_weight_and_validation_data():
    def work():
        x, y = samples()
        weight = np.linspace(0.1, 3, SAMPLES).astype("float32")
        model = network(weighted_metrics=["accuracy"])
        found = fit(
            model,
            x,
            y,
            sample_weight=weight,
            validation_data=(x[:7], y[:7], weight[:7]),
        )
        more = fit(
            model,
            x,
            y,
            class_weight={i: 0.5 + i for i in range(CLASSES)},
            validation_split=0.3,
        )
        return model, {**found, **{f"class_{k}": v for k, v in more.items()}}

    compare(work)


def test_callbacks(tmp_path):
    class Seen(keras.callbacks.Callback):
        def __init__(self):
            super().__init__()
            self.losses = []

        def on_train_batch_end(self, batch, logs=None):
            self.losses.append(logs["loss"])

    # First that of the plain model, then that of the split one.
    folders = []

    def work():
        folders.append(tmp_path if folders else harness.own_folder(tmp_path))
        x, y = samples()
        model = network()
        seen = Seen()
        path = str(folders[-1] / "epoch_{epoch}.weights.h5")
        found = fit(
            model,
            x,
            y,
            epochs=6,
            validation_data=(x, y),
            callbacks=[
                seen,
                keras.callbacks.ModelCheckpoint(path, save_weights_only=True),
                keras.callbacks.ReduceLROnPlateau(
                    factor=0.5, patience=1, min_delta=10.0
                ),
                keras.callbacks.EarlyStopping(
                    patience=3, min_delta=10.0, restore_best_weights=True
                ),
                keras.callbacks.CSVLogger(str(folders[-1] / "log.csv")),
            ],
        )
        # No loss falls by 10, so training stops after the patience, and the
        # rate was halved on the way.
        assert len(found["loss"]) == 4
        assert found["learning_rate"][-1] < 0.01
        assert (folders[-1] / "epoch_4.weights.h5").exists()
        assert (folders[-1] / "log.csv").exists()
        return model, {**found, "batches": seen.losses}

    model = compare(work)
    # The best epoch was the first: its weights are those of the checkpoint.
    restored = harness.weights_of(model)
    model.load_weights(str(folders[-1] / "epoch_1.weights.h5"))
    for path, value in harness.weights_of(model).items():
        np.testing.assert_array_equal(value, restored[path], path)


def test_tensorboard(tmp_path):
    pytest.importorskip("tensorflow", reason="the callback writes with it")
    pytest.importorskip("tensorboard", reason="the callback writes with it")

    def work():
        model = network()
        callback = keras.callbacks.TensorBoard(
            str(tmp_path / "logs"), histogram_freq=1
        )
        return model, fit(model, callbacks=[callback])

    compare(work)
    assert list((tmp_path / "logs").rglob("events*"))


def test_tf_data():
    tf = pytest.importorskip("tensorflow", reason="the input is its dataset")

    def work():
        data = tf.data.Dataset.from_tensor_slices(samples()).batch(BATCH)
        model = network()
        found = model.fit(
            data, epochs=2, verbose=0, validation_data=data
        ).history
        found["predict"] = model.predict(data, verbose=0)
        return model, found

    compare(work)


def test_py_dataset():
    class Batches(keras.utils.PyDataset):
        def __len__(self):
            return 3

        def __getitem__(self, index):
            x, y = samples()
            part = slice(index * BATCH, (index + 1) * BATCH)
            return x[part], y[part]

    def work():
        model = network()
        found = model.fit(Batches(), epochs=2, shuffle=False, verbose=0).history
        found["evaluate"] = model.evaluate(Batches(), verbose=0)
        found["predict"] = model.predict(Batches(), verbose=0)
        return model, found

    compare(work)


def test_a_generator():
    def work():
        x, y = samples(8)
        model = network()
        batches = ((x[i : i + 4], y[i : i + 4]) for i in (0, 4, 0, 4))
        found = model.fit(
            batches, epochs=2, steps_per_epoch=2, verbose=0
        ).history
        return model, found

    compare(work)


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
def test_mixed_precision(policy):
    def work():
        keras.mixed_precision.set_dtype_policy(policy)
        model = network()
        found = fit(model, epochs=4)
        assert model.get_layer("up").kernel.dtype == "float32"
        assert model.get_layer("up").compute_dtype == policy[len("mixed_") :]
        # float16 is trained with a scaled loss, whichever optimizer is given.
        scaled = isinstance(
            model.optimizer, keras.optimizers.LossScaleOptimizer
        )
        assert scaled == (policy == "mixed_float16")
        keras.mixed_precision.set_dtype_policy("float32")
        return model, found

    compare(work, tolerance=1e-2)


def test_bfloat16_weights():
    def work():
        keras.config.set_dtype_policy("bfloat16")
        # On torch, no accuracy: a logit rounded otherwise decides a sample
        # otherwise.
        rounded = keras.config.backend() == "torch"
        arguments = {"metrics": []} if rounded else {}
        model = network(optimizer="sgd", **arguments)
        keras.config.set_dtype_policy("float32")
        return model, fit(model)

    model = compare(work, tolerance=1e-2)
    row = distribution.describe(model)["up/kernel"]
    assert row.bytes == FEATURES * 16 * 2
    assert set(row.device_bytes.values()) == {row.bytes // 2}


@pytest.mark.skipif(
    keras.config.backend() == "torch",
    reason="Keras refuses steps_per_execution on torch",
)
def test_steps_per_execution():
    def work():
        model = network(steps_per_execution=2)
        found = fit(model)
        x, y = samples()
        found["evaluate"] = model.evaluate(x, y, batch_size=BATCH, verbose=0)
        found["predict"] = model.predict(x, batch_size=BATCH, verbose=0)
        return model, found

    compare(work)


def test_run_eagerly():
    def work():
        model = network(run_eagerly=True)
        x, y = samples(7)
        found = fit(model, x, y, epochs=1)
        found["evaluate"] = model.evaluate(x, y, batch_size=BATCH, verbose=0)
        return model, found

    compare(work)


def test_plain_tensors_in_a_train_step():
    class Shifted(keras.Model):
        """Makes tensors that nobody laid out, and mixes them in."""

        def train_step(self, *args):
            # On JAX the state comes first, and has to be handed on.
            *state, (x, y) = args
            shift = ops.arange(FEATURES, dtype="float32") / 10.0
            x = x + shift + ops.convert_to_tensor([0.5])
            return super().train_step(*state, (x, y))

        def compute_loss(self, *args, **kwargs):
            loss = super().compute_loss(*args, **kwargs)
            norm = sum(ops.sum(ops.square(w)) for w in self.trainable_weights)
            return loss + norm * ops.convert_to_tensor(0.01)

        def call(self, *args, **kwargs):
            logits = super().call(*args, **kwargs)
            return logits + ops.ones((CLASSES,)) * ops.cast(
                np.arange(CLASSES), "float32"
            )

    def work():
        plain = network()
        model = compiled(Shifted(plain.input, plain.output, name="shifted"))
        x, y = samples()
        found = fit(model, x, y)
        found["predict"] = model.predict(x, verbose=0)
        return model, found

    compare(work)


class Counting(layers.Layer):
    """A layer with integer and boolean variables, which a step changes."""

    def build(self, shape):
        self.calls = self.add_weight(
            name="calls",
            shape=(shape[-1],),
            dtype="int32",
            initializer="zeros",
            trainable=False,
        )
        self.seen = self.add_weight(
            name="seen",
            shape=(shape[-1],),
            dtype="bool",
            initializer="zeros",
            trainable=False,
        )

    def call(self, x, training=False):
        if training:
            positive = ops.any(x > 0, axis=0)
            self.calls.assign(self.calls + ops.cast(positive, "int32"))
            self.seen.assign(ops.logical_or(self.seen, positive))
        return x * ops.cast(self.seen, x.dtype) + x


def test_integer_and_boolean_variables():
    def work():
        inputs = keras.Input((FEATURES,))
        x = zoo.dense(16, "up", activation="relu")(inputs)
        x = Counting(name="counting")(x)
        x = zoo.dense(CLASSES, "down")(x)
        model = compiled(keras.Model(inputs, x, name="counted"))
        found = fit(model)
        assert np.any(ops.convert_to_numpy(model.get_layer("counting").calls))
        assert np.any(ops.convert_to_numpy(model.get_layer("counting").seen))
        return model, found

    compare(work)
    # Split like the activations that they stand for, too.
    compare(
        work,
        {**LAYOUTS, "counting/(calls|seen)": ("model",)},
        SPLIT | {"counting/calls", "counting/seen"},
    )


def test_metrics():
    def work():
        inputs = keras.Input((FEATURES,))
        x = zoo.dense(16, "up", activation="relu")(inputs)
        x = zoo.dense(CLASSES, "down", activation="softmax")(x)
        model = compiled(
            keras.Model(inputs, x, name="measured"),
            loss="categorical_crossentropy",
            metrics=[
                keras.metrics.AUC(name="auc", multi_label=True, num_labels=5),
                keras.metrics.TopKCategoricalAccuracy(2, name="top"),
                keras.metrics.Precision(name="precision"),
                keras.metrics.F1Score(name="f1"),
                keras.metrics.MeanIoU(
                    CLASSES,
                    sparse_y_true=False,
                    sparse_y_pred=False,
                    name="iou",
                ),
            ],
        )
        x, y = samples()
        y = np.eye(CLASSES, dtype="float32")[y]
        found = fit(model, x, y)
        for name, value in model.evaluate(
            x, y, batch_size=BATCH, verbose=0, return_dict=True
        ).items():
            found[f"evaluate_{name}"] = value
        assert {"auc", "top", "precision", "f1", "iou"} <= set(found)
        return model, found

    compare(work)


@pytest.mark.parametrize("first", ["fit", "evaluate", "count_collectives"])
def test_metrics_that_were_made_before_the_distribution(first):
    x, y = samples()

    def trained(metric):
        keras.utils.set_random_seed(1)
        # An optimizer with slots would make variables when it is built.
        model = network(optimizer="sgd", metrics=[metric])
        if first == "evaluate":
            model.evaluate(x, y, batch_size=BATCH, verbose=0)
        if first == "count_collectives" and distribution.distribution():
            distribution.count_collectives(model, x[:BATCH], y[:BATCH])
        return fit(model)

    def metric():
        return keras.metrics.SparseTopKCategoricalAccuracy(2, name="top")

    expected, made = trained(metric()), metric()
    with harness.model_parallel(LAYOUTS, harness.fitted((2, 2))).scope():
        found = trained(made)
    assert found.keys() == expected.keys() == {"loss", "top"}
    for name, values in expected.items():
        np.testing.assert_allclose(found[name], values, rtol=1e-5)


def gathers(model):
    x, y = samples(BATCH)
    return distribution.count_collectives(model, x, y)["all_gather"][0]


def test_layouts_of_layer_outputs():
    """What a column-parallel layer gives is asked for whole, and gathered."""

    def work():
        x, y = samples()
        model = network()
        found = fit(model, x, y)
        found["evaluate"] = model.evaluate(x, y, batch_size=BATCH, verbose=0)
        found["predict"] = model.predict(x, batch_size=BATCH, verbose=0)
        found["train"] = model.train_on_batch(x[:5], y[:5])
        return model, found

    assert gathers(compare(work)) == 0
    layouts = {**LAYOUTS, ".*up/output": ("batch", None)}
    assert gathers(compare(work, layouts)) > 0
    # The one that is there anyway costs nothing.
    layouts = {**LAYOUTS, ".*up/output": ("batch", "model")}
    assert gathers(compare(work, layouts)) == 0


@pytest.mark.skipif(
    keras.config.backend() == "tensorflow",
    reason="a DTensor layout has one mesh axis for each dim; it is refused",
)
def test_a_dim_over_two_mesh_axes():
    def work():
        model = network()
        return model, fit(model)

    layouts = {
        "up/kernel": (("batch", "model"), None),
        "down/kernel": (("batch", "model"), None),
    }
    model = compare(work, layouts, {"up/kernel", "down/kernel"})
    report = distribution.describe(model)
    shape = harness.fitted((2, 2))
    split = [row for row in report.rows if row.is_split]
    # The two kernels, and two slots for each.
    assert len(split) == 6
    for row in split:
        assert row.axes == (("batch", "model"), None)
        assert row.device_bytes == dict.fromkeys(
            harness.mesh_devices(shape), row.bytes // math.prod(shape)
        )


def test_shared_layers():
    def work():
        left, right = keras.Input((FEATURES,)), keras.Input((FEATURES,))
        up = zoo.dense(16, "up", activation="relu")
        down = zoo.dense(CLASSES, "down")
        x = layers.Subtract(name="subtract")([up(left), up(right)])
        x = layers.Add(name="add")([down(x), down(up(left))])
        model = compiled(keras.Model([left, right], x, name="shared"))
        x, y = samples()
        found = fit(model, [x, x[::-1]], y)
        return model, found

    compare(work)


class Subclassed(keras.Model):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.up = zoo.dense(16, "up", activation="relu")
        self.drop = layers.Dropout(0.5)
        self.down = zoo.dense(CLASSES, "down")

    def call(self, x, training=False):
        return self.down(self.drop(self.up(x), training=training))


def sequential():
    # Without an input: `fit` builds it.
    return keras.Sequential(
        [
            zoo.dense(16, "up", activation="relu"),
            zoo.dense(CLASSES, "down"),
        ],
        name="outer",
    )


def sequential_with_input():
    return keras.Sequential(
        [
            keras.Input((FEATURES,)),
            zoo.dense(16, "up", activation="relu"),
            zoo.dense(CLASSES, "down"),
        ],
        name="outer",
    )


def nested():
    inner = keras.Input((FEATURES,))
    inner = keras.Model(
        inner,
        zoo.dense(16, "up", activation="relu")(inner),
        name="inner",
    )
    inputs = keras.Input((FEATURES,))
    x = zoo.dense(FEATURES, "first")(inputs)
    x = zoo.dense(CLASSES, "down")(inner(x))
    return keras.Model(inputs, x, name="outer")


def nested_in_sequential():
    return keras.Sequential(
        [
            keras.Sequential(
                [zoo.dense(16, "up", activation="relu")], name="inner"
            ),
            zoo.dense(CLASSES, "down"),
        ],
        name="outer",
    )


@pytest.mark.parametrize(
    "build",
    [
        lambda: Subclassed(name="outer"),
        sequential,
        sequential_with_input,
        nested,
        nested_in_sequential,
    ],
    ids=[
        "subclassed",
        "sequential",
        "sequential_with_input",
        "nested",
        "nested_in_sequential",
    ],
)
def test_kinds_of_models(build):
    paths = []

    def work():
        model = compiled(build())
        x, y = samples()
        found = fit(model, x, y)
        found["evaluate"] = model.evaluate(x, y, batch_size=BATCH, verbose=0)
        found["predict"] = model.predict(x, batch_size=BATCH, verbose=0)
        split = ("up/kernel", "up/bias", "down/kernel")
        paths[:] = [v.path for v in model.weights if v.path.endswith(split)]
        assert len(paths) == 3
        return model, found

    # Read after the first of the two runs.
    class Paths:
        def __iter__(self):
            return iter(paths)

    compare(work, split=Paths())


@pytest.mark.parametrize(
    "clipping",
    [
        {"global_clipnorm": 0.05},
        {"clipnorm": 0.05},
        {"clipvalue": 0.01},
    ],
    ids=lambda clipping: next(iter(clipping)),
)
def test_gradient_clipping(clipping):
    """The norm is that of the whole gradient, not that of a device's part."""

    def work():
        model = network(optimizer=keras.optimizers.SGD(1.0, **clipping))
        before = harness.weights_of(model)
        found = fit(model, epochs=1, batch_size=SAMPLES)
        moved = [
            harness.weights_of(model)[path] - value
            for path, value in before.items()
        ]
        norms = [np.linalg.norm(m) for m in moved]
        # It was clipped, and not to less than was asked for.
        if "global_clipnorm" in clipping:
            np.testing.assert_allclose(np.linalg.norm(norms), 0.05, rtol=1e-4)
        elif "clipnorm" in clipping:
            np.testing.assert_allclose(max(norms), 0.05, rtol=1e-4)
        else:
            largest = max(np.max(np.abs(m)) for m in moved)
            np.testing.assert_allclose(largest, 0.01, rtol=1e-4)
        return model, found

    compare(work)


def test_schedule_and_regularizers():
    def work():
        inputs = keras.Input((FEATURES,))
        x = zoo.dense(
            16,
            "up",
            activation="relu",
            kernel_regularizer="l2",
            kernel_constraint=keras.constraints.MaxNorm(0.8),
            activity_regularizer="l1",
        )(inputs)
        x = zoo.dense(CLASSES, "down", bias_regularizer="l1")(x)
        schedule = keras.optimizers.schedules.CosineDecay(0.05, 6)
        model = compiled(
            keras.Model(inputs, x, name="regular"),
            optimizer=keras.optimizers.SGD(schedule, momentum=0.9),
        )
        return model, fit(model)

    compare(work)


def test_frozen_layers():
    def work():
        model = network()
        model.get_layer("up").trainable = False
        before = harness.weights_of(model)
        compiled(model)
        found = fit(model)
        after = harness.weights_of(model)
        np.testing.assert_array_equal(before["up/kernel"], after["up/kernel"])
        assert np.any(before["down/kernel"] != after["down/kernel"])
        return model, found

    compare(work)


def test_verbose_output_and_history_are_as_usual(capsys):
    def work():
        model = network()
        x, y = samples()
        history = model.fit(
            x, y, batch_size=BATCH, epochs=2, shuffle=False, verbose=2
        )
        assert history.epoch == [0, 1]
        assert set(history.history) == {"loss", "accuracy"}
        # Plain floats, as every callback expects.
        json.dumps(history.history)
        return model, history.history

    compare(work)
    # Both runs' epochs; of several processes the first prints for a split one.
    times = 2 if os.environ.get("RANK", "0") == "0" else 1
    printed = capsys.readouterr().out
    assert printed.count("Epoch 1/2") == printed.count("Epoch 2/2") == times
