import json
import re
import zipfile

import keras
import numpy as np
import pytest
from keras import layers

from integration_tests import harness
from keras_tp import TensorParallelKeras
from keras_tp import distribution as dist

BATCH = 4
WORLDS = harness.shapes((2,), (4,))


def bias():
    return keras.initializers.RandomUniform(-0.5, 0.5, seed=5)


def dense(units, name, **kwargs):
    return layers.Dense(units, name=name, bias_initializer=bias(), **kwargs)


def sequential():
    return keras.Sequential(
        [
            keras.Input((6,)),
            dense(16, "up", activation="relu"),
            dense(3, "down"),
        ],
        name="net",
    )


def functional():
    """Nested, with a layer that is used twice."""
    inner = sequential()
    inputs = keras.Input((6,))
    shared = dense(6, "shared", activation="tanh")
    x = inner(shared(shared(inputs)))
    return keras.Model(inputs, x, name="outer")


@keras.saving.register_keras_serializable("tensor_parallel_keras_test")
class Net(keras.Model):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.up = dense(16, "up", activation="relu")
        self.down = dense(3, "down")

    def build(self, shape):
        self.up.build(shape)
        self.down.build((*shape[:-1], 16))
        self.built = True

    def call(self, x):
        return self.down(self.up(x))


def subclassed():
    model = Net(name="own")
    model.build((None, 6))
    return model


def opt():
    # Imported late: it takes seconds, and most tests do without.
    import keras_hub

    backbone = keras_hub.models.OPTBackbone(
        vocabulary_size=48,
        num_layers=1,
        num_heads=4,
        hidden_dim=16,
        intermediate_dim=32,
        dropout=0.0,
        max_sequence_length=12,
    )
    return keras_hub.models.OPTCausalLM(backbone, preprocessor=None)


MODELS = {
    "sequential": sequential,
    "functional": functional,
    "subclassed": subclassed,
    "opt": opt,
}


def data(kind, batches=2):
    rng = np.random.default_rng(0)
    count = batches * BATCH
    if kind != "opt":
        x = rng.normal(size=(count, 6)).astype("float32")
        return x, rng.normal(size=(count, 3)).astype("float32")
    tokens = rng.integers(1, 48, (2, count, 12)).astype("int32")
    mask = np.ones((count, 12), "int32")
    return {"token_ids": tokens[0], "padding_mask": mask}, tokens[1]


def built(kind):
    keras.utils.set_random_seed(1)
    return MODELS[kind]()


def trained(kind):
    """A model with momentum in its slots."""
    model = built(kind)
    loss = "mse"
    if kind == "opt":
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer = keras.optimizers.SGD(0.05, momentum=0.9)
    options = {"sampler": "greedy"} if kind == "opt" else {}
    # OPT's own metric is not what is tested here.
    model.compile(optimizer, loss, weighted_metrics=[], **options)
    fit(model, kind)
    return model


def fit(model, kind):
    x, y = data(kind)
    return model.fit(
        x, y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0
    ).history["loss"]


def summary(model):
    lines = []
    model.summary(print_fn=lambda line, **_: lines.append(line))
    return "\n".join(lines)


def config_in(path):
    """Returns the config in a file, without the ids of Python's objects."""
    with zipfile.ZipFile(path) as file:
        text = file.read("config.json").decode()
    return re.sub(r'"shared_object_id": \d+', "", text)


@WORLDS
@pytest.mark.parametrize("kind", MODELS)
def test_the_same_model_comes_back_split(kind, shape):
    harness.mesh(shape, ["model"])
    plain, model = built(kind), built(kind)
    assert not isinstance(model, TensorParallelKeras)
    x, _ = data(kind)
    want, weights = plain.predict(x, verbose=0), plain.get_weights()
    paths, text = [v.path for v in model.weights], summary(model)
    assert TensorParallelKeras(model, world_size=shape[0]) is model
    assert isinstance(model, TensorParallelKeras)
    assert type(model) is type(plain)
    assert not isinstance(plain, TensorParallelKeras)
    assert model.world_size == shape[0]
    assert list(model.device_ids) == dist.list_devices()[: shape[0]]
    assert [v.path for v in model.weights] == paths
    assert summary(model) == text
    for old, new in zip(weights, model.get_weights(), strict=True):
        np.testing.assert_array_equal(new, old)
    np.testing.assert_allclose(
        model.predict(x, verbose=0), want, rtol=1e-5, atol=1e-5
    )
    rows = dist.describe(model).rows
    split = [row for row in rows if row.is_split]
    assert sum(row.bytes for row in split) > 0.7 * sum(r.bytes for r in rows)
    for row in split:
        assert row.device_bytes == {
            device: row.bytes // shape[0] for device in model.device_ids
        }
    # Nothing is compiled by it.
    assert model.compiled == plain.compiled
    assert dist.distribution() is None


@WORLDS
@pytest.mark.parametrize("kind", MODELS)
def test_training_goes_on_as_on_one_device(kind, shape):
    harness.mesh(shape, ["model"])
    reference = trained(kind)
    want = fit(reference, kind)
    model = trained(kind)
    optimizer = model.optimizer
    slots = [np.array(v) for v in optimizer.variables]
    TensorParallelKeras(model, world_size=shape[0])
    assert model.compiled and model.optimizer is optimizer
    for old, new in zip(slots, optimizer.variables, strict=True):
        np.testing.assert_array_equal(np.array(new), old)
    np.testing.assert_allclose(fit(model, kind), want, rtol=1e-5)
    for old, new in zip(
        reference.get_weights(), model.get_weights(), strict=True
    ):
        assert harness.difference(new, old) < 1e-5
    report = dist.describe(model)
    for row in report.rows:
        if row.role == "slot" and row.shape:
            assert row.axes == report[path_of(row, model)].axes, row.path


def path_of(slot, model):
    """Returns the path of the weight whose momentum a row is."""
    flat = slot.path.split("/", 1)[1].removesuffix("_momentum")
    return next(
        v.path for v in model.weights if v.path.replace("/", "_") == flat
    )


@pytest.mark.parametrize("kind", MODELS)
def test_its_file_is_that_of_the_plain_model(kind, tmp_path):
    keras.utils.clear_session()
    plain = trained(kind)
    file = harness.own_folder(tmp_path) / "plain.keras"
    plain.save(file)
    keras.utils.clear_session()
    model = TensorParallelKeras(trained(kind))
    model.save(tmp_path / "model.keras")
    assert config_in(tmp_path / "model.keras") == config_in(file)
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert type(loaded) is type(plain)
    assert not isinstance(loaded, TensorParallelKeras)
    assert not hasattr(loaded, "world_size")
    assert all(row.axes is None for row in dist.describe(loaded).rows)
    for old, new in zip(plain.get_weights(), loaded.get_weights(), strict=True):
        np.testing.assert_array_equal(new, old)
    x, _ = data(kind)
    np.testing.assert_allclose(
        loaded.predict(x, verbose=0),
        plain.predict(x, verbose=0),
        rtol=1e-5,
        atol=1e-5,
    )
    assert type(model.from_config(model.get_config())) is type(plain)


def test_all_devices_there_are_is_the_default():
    model = TensorParallelKeras(built("sequential"))
    assert list(model.device_ids) == dist.list_devices()
    assert model.world_size == dist.get_device_count()


def test_devices_in_an_order_of_the_user():
    names = dist.list_devices()[::-1]
    model = TensorParallelKeras(built("sequential"), device_ids=names)
    assert model.device_ids == tuple(names)
    assert model.world_size == len(names)
    held = dist.describe(model)["net/up/kernel"].device_bytes
    assert set(held) == set(names)


def test_one_device():
    model = TensorParallelKeras(built("sequential"), world_size=1)
    assert isinstance(model, TensorParallelKeras)
    assert list(dist.describe(model).device_bytes) == dist.list_devices()[:1]
    model = TensorParallelKeras(model)
    assert model.world_size == dist.get_device_count()


@WORLDS
def test_what_is_reported_is_read_from_the_live_arrays(shape):
    harness.mesh(shape, ["model"])
    model = TensorParallelKeras(trained("sequential"), world_size=shape[0])
    report = dist.describe(model).to_dict()
    known = [json.dumps(row) for row in report["variables"]]
    by_role = {}
    for info in (
        model.get_parallelism_info(),
        model.get_gradient_sharding_info(),
    ):
        rows = info["variables"]
        assert all(json.dumps(row) in known for row in rows)
        assert info["total_bytes"] == sum(row["bytes"] for row in rows)
        assert info["device_bytes"] == {
            device: sum(row["device_bytes"][device] for row in rows)
            for device in model.device_ids
        }
        by_role[tuple(sorted({row["role"] for row in rows}))] = info
    weights, gradients = by_role[("weight",)], by_role[("slot", "weight")]
    assert len(weights["variables"]) == 4
    # Four weights, their momentum, iterations and the learning rate.
    assert len(gradients["variables"]) == 10
    kernels = [r for r in weights["variables"] if r["path"].endswith("kernel")]
    assert weights["split_bytes"] >= sum(row["bytes"] for row in kernels)
    model.get_layer("up").trainable = False
    paths = [r["path"] for r in model.get_gradient_sharding_info()["variables"]]
    assert "net/up/kernel" not in paths and "net/down/kernel" in paths
    one = dist.DataParallel(devices=dist.list_devices()[:1])
    dist.distribute_model(model, one)
    info = model.get_parallelism_info()
    assert info["split_bytes"] == 0
    assert list(info["device_bytes"]) == dist.list_devices()[:1]


OWN = keras.config.backend()
OTHER = {"jax": "torch", "torch": "tensorflow", "tensorflow": "jax"}[OWN]
ALIAS = {"torch": "pytorch"}.get(OWN, OWN)


@pytest.mark.parametrize(
    "arguments, words",
    [
        ({"world_size": 0}, ["world_size=0"]),
        ({"world_size": True}, ["world_size=True"]),
        ({"world_size": 2.0}, ["world_size=2.0"]),
        ({"world_size": 99}, ["`world_size` to ", "--devices 99", "=99"]),
        ({"device_ids": []}, ["list_devices()", "device_ids=[]"]),
        ({"device_ids": "cpu:0"}, ["list_devices()", "device_ids='cpu:0'"]),
        ({"device_ids": [0]}, ["list_devices()", "device_ids=[0]"]),
        ({"device_ids": ["cpu:99"]}, ["'cpu:99'", "--devices 100"]),
        ({"device_ids": ["cpu:0", "cpu:0"]}, ["only once", "['cpu:0']"]),
        ({"device_ids": ["cpu:0", "gpu:0"]}, ["one type", "'gpu:0'"]),
        (
            {"device_ids": ["cpu:0"], "world_size": 2},
            ["leave one", "world_size=2"],
        ),
        ({"device_ids": ["tpu:0"]}, ["'tpu'"]),
        ({"distributed_backend": "mpi"}, ["unknown", "'auto'", "'mpi'"]),
        ({"distributed_backend": None}, ["unknown", "=None"]),
        ({"distributed_backend": "horovod"}, ["Horovod", '"auto"', OWN]),
        ({"distributed_backend": "fallback"}, ["does not simulate", '"auto"']),
        (
            {"distributed_backend": OTHER},
            [f"KERAS_BACKEND={OTHER}", f"keras.config.backend()={OWN!r}"],
        ),
        (
            {"distributed_backend": "nccl"},
            ['"gloo"', "'nccl'"] if OWN == "torch" else ["KERAS_BACKEND=torch"],
        ),
    ],
    ids=str,
)
def test_what_cannot_be_is_a_value_error(arguments, words):
    model = built("sequential")
    with pytest.raises(ValueError) as error:
        TensorParallelKeras(model, **arguments)
    for word in words:
        assert word in str(error.value)
    assert "Received: " in str(error.value)
    assert not isinstance(model, TensorParallelKeras)
    assert all(v._layout is None for v in model.variables)


@pytest.mark.skipif(OWN == "torch", reason="gloo is what torch runs here")
def test_gloo_needs_torch():
    with pytest.raises(ValueError, match="KERAS_BACKEND=torch"):
        TensorParallelKeras(built("sequential"), distributed_backend="gloo")


@pytest.mark.parametrize(
    "name", ["auto", OWN, ALIAS] + (["gloo"] if OWN == "torch" else [])
)
def test_the_backend_that_runs(name):
    model = built("sequential")
    assert TensorParallelKeras(model, distributed_backend=name) is model


def test_only_a_built_model():
    with pytest.raises(ValueError, match="built model.*'empty'"):
        TensorParallelKeras(keras.Sequential([layers.Dense(4)], name="empty"))
    with pytest.raises(ValueError, match="keras.Model"):
        TensorParallelKeras(layers.Dense(4))
