"""Memory, numbers and methods of a sharded model, against one device.

The reference is a model of its own on one device. README.md of this folder
names the row that each test shows.
"""

import gc

import keras
import numpy as np
import pytest
from keras import layers

from integration_tests import harness
from integration_tests import zoo
from keras_tp import TensorParallelKeras
from keras_tp import backend
from keras_tp import distribution
from keras_tp.distribution import model_state

BACKEND = keras.config.backend()
WORLDS = harness.shapes((2,), (4,))
BATCH, FEATURES, UNITS, OUTPUTS = 8, 12, 24, 5
STEPS = 10


def pair(optimizer=None):
    """A column and a row layer, and what is before needs a gradient."""
    keras.utils.set_random_seed(1)
    inputs = keras.Input((FEATURES,))
    x = zoo.dense(FEATURES + 1, "first", activation="tanh")(inputs)
    x = zoo.dense(UNITS, "up", activation="relu")(x)
    model = keras.Model(inputs, zoo.dense(OUTPUTS, "down")(x), name="pair")
    optimizer = optimizer or keras.optimizers.Adam(0.01)
    model.compile(optimizer, "mse", metrics=["mae"])
    return model


def wrapped(shape, optimizer=None):
    harness.mesh(shape, ["model"])
    return TensorParallelKeras(pair(optimizer), world_size=shape[0])


def data():
    rng = np.random.default_rng(0)
    return (
        rng.standard_normal((BATCH, FEATURES), "float32"),
        rng.standard_normal((BATCH, OUTPUTS), "float32"),
    )


def rows_of(model, role):
    return [r for r in distribution.describe(model).rows if r.role == role]


def counts(model, x, y=None):
    found = distribution.count_collectives(model, x, y)
    return {name: pair for name, pair in found.items() if pair[0]}


def local_parts(value):
    """Returns what the devices of this process hold of a live tensor."""
    if BACKEND == "jax":
        return [np.array(shard.data) for shard in value.addressable_shards]
    if BACKEND == "torch":
        # A batch that nothing splits stays as it is, in every process.
        value = value.to_local() if hasattr(value, "to_local") else value
        return [keras.ops.convert_to_numpy(value)]
    from tensorflow.experimental import dtensor

    return [part.numpy() for part in dtensor.unpack(value)]


def zero_the_first_part(variable):
    """Zeros what the first device holds of a variable, past Keras."""
    value = variable._value
    if BACKEND == "jax":
        import jax

        parts = [shard.data for shard in value.addressable_shards]
        parts[0] = parts[0] * 0
        variable._value = jax.make_array_from_single_device_arrays(
            value.shape, value.sharding, parts
        )
    elif BACKEND == "torch":
        if backend.distribution_lib.process_id() == 0:
            value.to_local().detach().zero_()
    else:
        from tensorflow.experimental import dtensor

        parts = dtensor.unpack(value.read_value())
        parts[0] = parts[0] * 0
        value.assign(dtensor.pack(parts, value.layout))


def whole_tensors(shape):
    """Returns how many tensors of a shape a device holds as a whole."""
    gc.collect()
    if BACKEND == "jax":
        import jax

        held = [shard.data for a in jax.live_arrays() for shard in local(a)]
        return sum(part.shape == shape for part in held)
    if BACKEND == "torch":
        import torch

        kinds = (torch.Tensor, torch.nn.Parameter)
        size = 4 * int(np.prod(shape))
        return sum(
            type(value) in kinds
            and tuple(value.shape) == shape
            and value.untyped_storage().nbytes() == size
            for value in gc.get_objects()
        )
    import tensorflow as tf
    from tensorflow.experimental import dtensor

    return sum(
        isinstance(value, (type(tf.zeros(())), tf.Variable))
        and tuple(value.shape) == shape
        and not dtensor.is_dtensor(value)
        for value in gc.get_objects()
    )


def local(array):
    return [] if array.is_deleted() else array.addressable_shards


@WORLDS
def test_bytes_of_split_variables(shape):
    split = [r for r in rows_of(wrapped(shape), "weight") if r.is_split]
    assert {"up/kernel", "up/bias", "down/kernel"} <= {r.path for r in split}
    names = distribution.list_devices()[: shape[0]]
    for row in split:
        assert row.device_bytes == dict.fromkeys(names, row.bytes // shape[0])


@WORLDS
def test_bytes_of_the_model(shape):
    model = wrapped(shape)
    info = model.get_parallelism_info()
    assert info["total_bytes"] == 4 * model.count_params()
    whole = sum(r.bytes for r in rows_of(model, "weight") if not r.is_split)
    for held in info["device_bytes"].values():
        assert held <= info["total_bytes"] / shape[0] + whole
        assert held < info["total_bytes"]


@WORLDS
def test_slots_are_laid_out_like_their_variable(shape):
    model = wrapped(shape)
    model.train_on_batch(*data())
    weights = {r.path.replace("/", "_"): r for r in rows_of(model, "weight")}
    slots = [r for r in rows_of(model, "slot") if r.shape]
    assert len(slots) == 2 * len(weights)
    for slot in slots:
        name = slot.path.split("/")[-1]
        own = [r for p, r in weights.items() if name.startswith(p)]
        assert len(own) == 1, slot.path
        assert slot.axes == own[0].axes
        assert slot.device_bytes == own[0].device_bytes


@WORLDS
def test_no_hidden_copy(shape):
    harness.mesh(shape, ["model"])
    model = pair()
    model.train_on_batch(*data())
    kernel = tuple(model.get_layer("up").kernel.shape)
    # The kernel and its two slots: a copy would be found.
    assert whole_tensors(kernel) >= 3
    TensorParallelKeras(model, world_size=shape[0])
    model.train_on_batch(*data())
    model.predict(data()[0], verbose=0)
    assert whole_tensors(kernel) == 0


@WORLDS
@pytest.mark.parametrize("name", ["up", "down"])
def test_each_part_is_used(name, shape):
    model = wrapped(shape)
    x, _ = data()
    before = model.predict(x, verbose=0)
    plain = pair()
    kernel = keras.ops.convert_to_numpy(plain.get_layer(name).kernel).copy()
    part = UNITS // shape[0]
    kernel[(slice(None), slice(part)) if name == "up" else slice(part)] = 0
    plain.get_layer(name).kernel.assign(kernel)
    want = plain.predict(x, verbose=0)
    zero_the_first_part(model.get_layer(name).kernel)
    after = model.predict(x, verbose=0)
    assert np.max(np.abs(after - before)) > 0.1
    np.testing.assert_allclose(after, want, atol=1e-5)


@WORLDS
def test_inputs_are_whole_on_every_device(shape):
    model = wrapped(shape)
    x, _ = data()
    current = model_state.distribution_of(model)
    layout = current.get_data_layout(x.shape)
    with current.scope():
        value = backend.distribution_lib.distribute_data_input(
            x, layout, current.batch_dim_name
        )
    parts = local_parts(value)
    assert len(parts) == (1 if BACKEND == "torch" else shape[0])
    for part in parts:
        np.testing.assert_array_equal(part, x)


@WORLDS
def test_the_user_sees_the_whole_output(shape):
    x, _ = data()
    want = pair().predict(x, verbose=0)
    model = wrapped(shape)
    assert want.shape == (BATCH, OUTPUTS)
    np.testing.assert_allclose(model.predict(x, verbose=0), want, atol=1e-5)
    np.testing.assert_allclose(
        keras.ops.convert_to_numpy(model(x)), want, atol=1e-5
    )


@WORLDS
def test_forward_is_one_all_reduce(shape):
    x, _ = data()
    assert counts(wrapped(shape), x) == {"all_reduce": (1, BATCH * OUTPUTS * 4)}


@WORLDS
def test_backward_is_one_all_reduce_of_the_input_gradient(shape):
    assert counts(wrapped(shape), *data()) == {
        # The pair's output, and the gradient of its input.
        "all_reduce": (2, BATCH * (OUTPUTS + FEATURES + 1) * 4)
    }


@WORLDS
def test_gradients_put_together(shape):
    """A step of plain gradient descent at rate 1 subtracts the gradient."""

    def gradients(model):
        before = harness.weights_of(model)
        model.train_on_batch(*data())
        after = harness.weights_of(model)
        return {path: before[path] - after[path] for path in before}

    want = gradients(pair(keras.optimizers.SGD(1.0)))
    got = gradients(wrapped(shape, keras.optimizers.SGD(1.0)))
    for path, value in want.items():
        assert np.max(np.abs(value)) > 1e-3, path
        np.testing.assert_allclose(got[path], value, atol=1e-5, err_msg=path)


@WORLDS
def test_ten_steps_of_adam(shape):
    plain, model = pair(), wrapped(shape)
    want = [plain.train_on_batch(*data())[0] for _ in range(STEPS)]
    got = [model.train_on_batch(*data())[0] for _ in range(STEPS)]
    assert want[-1] < 0.9 * want[0]
    np.testing.assert_allclose(got, want, rtol=1e-4)
    # A sum over devices rounds differently: none would be one whole copy.
    one, many = harness.weights_of(plain), harness.weights_of(model)
    assert any((one[path] != many[path]).any() for path in one)


@WORLDS
def test_the_training_api_is_that_of_keras(shape):
    x, y = data()

    def use(model):
        history = model.fit(
            x,
            y,
            batch_size=4,
            epochs=3,
            validation_data=(x, y),
            shuffle=False,
            verbose=0,
        )
        assert isinstance(history, keras.callbacks.History)
        model.compile("adam", "mae", metrics=["mse"])
        return {
            **history.history,
            "evaluate": model.evaluate(x, y, verbose=0, return_dict=True),
            "predict": model.predict(x, verbose=0),
            "train_on_batch": model.train_on_batch(x, y, return_dict=True),
            "test_on_batch": model.test_on_batch(x, y),
            "predict_on_batch": model.predict_on_batch(x),
            # Five do not divide by anything.
            "uneven": model.evaluate(x[:5], y[:5], batch_size=4, verbose=0),
        }

    want, got = use(pair()), use(wrapped(shape))
    assert {"loss", "mae", "val_loss", "val_mae"} < want.keys()
    assert got.keys() == want.keys()
    for name, value in want.items():
        if isinstance(value, dict):
            assert got[name].keys() == value.keys()
            value, got[name] = [list(d.values()) for d in (value, got[name])]
        np.testing.assert_allclose(
            got[name], value, rtol=1e-4, atol=1e-5, err_msg=name
        )


def test_the_devices_that_exist():
    model = TensorParallelKeras(pair())
    names = distribution.list_devices()
    assert list(model.device_ids) == names
    assert set(model.get_parallelism_info()["device_bytes"]) == set(names)


@pytest.mark.parametrize(
    "arguments, named",
    [
        ({"world_size": -1}, "`world_size`"),
        ({"world_size": 1000}, "--devices 1000"),
        ({"device_ids": ["cpu:1000"]}, "--devices 1001"),
        ({"device_ids": ["cpu:0"] * 2}, "only once"),
        ({"distributed_backend": "mpi"}, "`distributed_backend`"),
    ],
)
def test_what_is_not_there_is_a_value_error(arguments, named):
    with pytest.raises(ValueError, match=named):
        TensorParallelKeras(pair(), **arguments)


@WORLDS
@pytest.mark.parametrize(
    "name",
    ["auto", "jax", "tensorflow", "torch", "pytorch", "gloo", "nccl"]
    + ["horovod", "fallback"],
)
def test_a_backend_communicates_or_raises(name, shape):
    harness.mesh(shape, ["model"])
    runs = {"auto", BACKEND}
    if BACKEND == "torch":
        # The devices of these tests are CPUs.
        runs |= {"pytorch", "gloo"}
    arguments = {"world_size": shape[0], "distributed_backend": name}
    if name not in runs:
        with pytest.raises(ValueError, match=f"Received: .*{name}"):
            TensorParallelKeras(pair(), **arguments)
        return
    model = TensorParallelKeras(pair(), **arguments)
    assert counts(model, data()[0]) == {"all_reduce": (1, BATCH * OUTPUTS * 4)}


@WORLDS
def test_each_device_contributes_to_what_is_communicated(shape):
    """A part that is zeroed is missing from the sum on every device."""
    model = wrapped(shape)
    x, _ = data()
    assert counts(model, x) == {"all_reduce": (1, BATCH * OUTPUTS * 4)}
    before = model.predict(x, verbose=0)
    zero_the_first_part(model.get_layer("down").kernel)
    after = model.predict(x, verbose=0)
    # What the first device had added, in the sum that the user sees.
    plain = pair()
    hidden = keras.Model(plain.input, plain.get_layer("up").output)
    part = UNITS // shape[0]
    kernel = keras.ops.convert_to_numpy(plain.get_layer("down").kernel)
    own = hidden.predict(x, verbose=0)[:, :part] @ kernel[:part]
    assert np.max(np.abs(own)) > 0.1
    np.testing.assert_allclose(before - after, own, atol=1e-5)


class Subclassed(keras.Model):
    def __init__(self):
        super().__init__(name="subclassed")
        self.up = zoo.dense(UNITS, "up", activation="relu")
        self.down = zoo.dense(OUTPUTS, "down")

    def call(self, x):
        return self.down(self.up(x))


def sequential():
    return keras.Sequential(
        [zoo.dense(UNITS, "up", activation="relu"), zoo.dense(OUTPUTS, "down")],
        name="sequential",
    )


def nested():
    inputs = keras.Input((FEATURES,))
    x = zoo.dense(FEATURES, "first", activation="tanh")(inputs)
    return keras.Model(inputs, sequential()(x), name="nested")


def shared():
    """A column and a row layer that are used twice."""
    inputs = keras.Input((FEATURES,))
    up = zoo.dense(UNITS, "up", activation="tanh")
    down = zoo.dense(FEATURES, "down")
    x = layers.Add(name="add")([inputs, down(up(inputs))])
    x = layers.Add(name="add_again")([x, down(up(x))])
    return keras.Model(inputs, zoo.dense(OUTPUTS, "head")(x), name="shared")


@WORLDS
@pytest.mark.parametrize(
    "build", [sequential, pair, Subclassed, nested, shared]
)
def test_models_of_every_kind(build, shape):
    harness.mesh(shape, ["model"])
    x, y = data()

    def losses(wrap):
        keras.utils.set_random_seed(1)
        model = build()
        model(x)
        wrap(model)
        model.compile(keras.optimizers.SGD(0.1), "mse")
        history = model.fit(
            x, y, batch_size=4, epochs=2, shuffle=False, verbose=0
        )
        return model, history.history["loss"]

    plain, want = losses(lambda model: model)
    model, got = losses(
        lambda model: TensorParallelKeras(model, world_size=shape[0])
    )
    np.testing.assert_allclose(got, want, rtol=1e-5)
    np.testing.assert_allclose(
        model.predict(x, verbose=0), plain.predict(x, verbose=0), atol=1e-5
    )
    kernels = [r for r in rows_of(model, "weight") if len(r.shape) == 2]
    # All but what is before or behind a pair.
    assert sum(row.is_split for row in kernels) >= 2


KINDS = {
    "dense": "mlp",
    "einsum_dense": "einsum_dense",
    "embedding": "embedding_rows",
    "multi_head_attention": "multi_head_attention",
    "grouped_query_attention": "grouped_query_attention",
    "convolution": "conv2d",
    "lstm": "lstm",
    "gru": "gru",
}


@WORLDS
@pytest.mark.parametrize("kind", KINDS)
def test_split_or_whole_for_a_reason(kind, shape):
    harness.mesh(shape, ["model"])
    case = zoo.CASES[KINDS[kind]]
    x, _ = harness.data_of(case)
    want = harness.build(case).predict(x, verbose=0)
    model = TensorParallelKeras(harness.build(case), world_size=shape[0])
    rows = rows_of(model, "weight")
    kernels = [r for r in rows if len(r.shape) > 1]
    assert kernels
    for row in rows:
        assert row.is_split or row.why, row
    split = sum(row.bytes for row in rows if row.is_split)
    if kind in ("lstm", "gru") and keras.config.backend() == "tensorflow":
        # Their gates are in one kernel, next to each other.
        assert not any(row.is_split for row in rows)
        assert all("blocks in one dim" in row.why for row in kernels[:2])
    else:
        # What begins or ends a model may be whole.
        assert split > 0.4 * sum(row.bytes for row in rows)
    np.testing.assert_allclose(model.predict(x, verbose=0), want, atol=1e-5)


@WORLDS
@pytest.mark.parametrize("name", ["bert", "gpt2", "roberta", "opt", "llama"])
def test_models_of_keras_hub(name, shape):
    harness.mesh(shape, ["model"])
    case = zoo.CASES[name]
    x, _ = harness.data_of(case)
    want = harness.build(case).predict(x, verbose=0)
    model = TensorParallelKeras(harness.build(case), world_size=shape[0])
    info = model.get_parallelism_info()
    assert info["split_bytes"] >= 0.9 * info["total_bytes"]
    np.testing.assert_allclose(model.predict(x, verbose=0), want, atol=1e-5)


@WORLDS
def test_the_plan_is_the_same_each_time_and_can_be_read(shape):
    mesh = harness.mesh(shape, ["model"])
    plans = [distribution.plan_sharding(pair(), mesh) for _ in range(2)]
    assert plans[0].to_json() == plans[1].to_json()
    text = plans[0].summary()
    assert "up/kernel" in text and "model" in text
    predicted = plans[0].collectives(BATCH)
    x, y = data()
    model = wrapped(shape)
    found = counts(model, x, y)
    assert {name: c for name, (c, _) in predicted.items() if c} == {
        name: c for name, (c, _) in found.items()
    }


@WORLDS
def test_a_layout_of_ones_own_for_a_path(shape):
    mesh = harness.mesh(shape, ["model"])
    x, y = data()
    plain = pair()
    overrides = {"down/kernel": (None, None), "up/kernel": (None, None)}
    model = pair()
    distribution.distribute_model(
        model, distribution.TensorParallel(mesh, overrides=overrides)
    )
    axes = {r.path: r.axes for r in rows_of(model, "weight")}
    assert axes["up/kernel"] == axes["down/kernel"] == (None, None)
    assert any(wrapped(shape).get_layer("up").kernel._layout.axes)
    want = [plain.train_on_batch(x, y)[0] for _ in range(3)]
    got = [model.train_on_batch(x, y)[0] for _ in range(3)]
    np.testing.assert_allclose(got, want, rtol=1e-5)


@WORLDS
def test_names_paths_files_and_graph(shape, tmp_path):
    keras.utils.clear_session()
    plain = pair()
    plain.save_weights(harness.own_folder(tmp_path) / "plain.weights.h5")
    keras.utils.clear_session()
    model = wrapped(shape)
    assert [layer.name for layer in model.layers] == [
        layer.name for layer in plain.layers
    ]
    assert [v.path for v in model.variables] == [
        v.path for v in plain.variables
    ]
    assert type(model) is type(plain)
    assert model.to_json() == plain.to_json()
    assert len(model.operations) == len(plain.operations)
    # Each reads the file of the other.
    model.save_weights(tmp_path / "split.weights.h5")
    want = harness.weights_of(plain)
    for variable in plain.weights:
        variable.assign(np.zeros(variable.shape, "float32"))
    plain.load_weights(tmp_path / "split.weights.h5")
    for path, value in harness.weights_of(plain).items():
        np.testing.assert_array_equal(value, want[path])
    for variable in model.weights:
        variable.assign(np.zeros(variable.shape, "float32"))
    model.load_weights(harness.own_folder(tmp_path) / "plain.weights.h5")
    for path, value in harness.weights_of(model).items():
        np.testing.assert_array_equal(value, want[path])
