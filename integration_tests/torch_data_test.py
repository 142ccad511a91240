"""Processes that are given only their part of the data; what has to agree.

Runs in every process. Errors are raised in all of them, so they stay in step.
"""

import os
import warnings

import keras
import numpy as np
import pytest
from keras import layers

if keras.config.backend() != "torch":
    pytest.skip("processes of torch", allow_module_level=True)

import torch
from keras.src.trainers.epoch_iterator import EpochIterator

from integration_tests import harness
from keras_tp import distribution
from keras_tp.backend.torch import compiling
from keras_tp.backend.torch import placement

FEATURES = 6
OUTPUTS = 5
# Of the global batch.
BATCH = 4
LAYOUTS = {
    ".*up/kernel": (None, "model"),
    ".*up/bias": ("model",),
    ".*down/kernel": ("model", None),
}
RANK = int(os.environ.get("RANK", 0))
WORLD = int(os.environ.get("WORLD_SIZE", 1))

pytestmark = pytest.mark.skipif(WORLD < 2, reason="needs several processes")


def model_parallel(auto_shard_dataset=False, data=2, layouts=LAYOUTS):
    mesh = harness.mesh((data, WORLD // data))
    layout_map = distribution.LayoutMap(mesh)
    for pattern, axes in layouts.items():
        layout_map[pattern] = axes
    return distribution.ModelParallel(
        layout_map=layout_map, auto_shard_dataset=auto_shard_dataset
    )


def network(up=16, name="up", dtype="float32", **compiled):
    keras.utils.set_random_seed(1)
    inputs = keras.Input((FEATURES,))
    x = layers.Dense(up, activation="relu", name=name, dtype=dtype)(inputs)
    x = layers.BatchNormalization(name="norm")(x)
    x = layers.Dropout(0.3, name="dropout")(x)
    outputs = layers.Dense(OUTPUTS, name="down")(x)
    model = keras.Model(inputs, outputs, name="network")
    compiled = {"metrics": ["mae"], **compiled}
    model.compile(keras.optimizers.SGD(0.1), "mse", **compiled)
    return model


def samples(count):
    rng = np.random.default_rng(3)
    return (
        rng.standard_normal((count, FEATURES), "float32"),
        rng.standard_normal((count, OUTPUTS), "float32"),
        rng.uniform(0.5, 2.0, count).astype("float32"),
    )


def rows_of_part(count, part, parts=2):
    """Returns the rows that one of the parts of each batch is made of."""
    own = BATCH // parts
    return [row for row in range(count) if row % BATCH // own == part]


class Arrays(torch.utils.data.Dataset):
    """Rows of arrays; notes which it was asked for."""

    def __init__(self, arrays):
        self.arrays = arrays
        self.loaded = set()

    def __len__(self):
        return len(self.arrays[0])

    def __getitem__(self, index):
        self.loaded.add(index)
        return tuple(array[index] for array in self.arrays)


class Py(keras.utils.PyDataset):
    def __init__(self, arrays, batch_size):
        super().__init__()
        self.arrays = arrays
        self.batch_size = batch_size

    @property
    def num_batches(self):
        return -(-len(self.arrays[0]) // self.batch_size)

    def __getitem__(self, index):
        rows = slice(index * self.batch_size, (index + 1) * self.batch_size)
        return tuple(array[rows] for array in self.arrays)


def as_arrays(arrays, size):
    names = ("x", "y", "sample_weight")
    return {**dict(zip(names, arrays)), "batch_size": size}


def as_loader(arrays, size):
    loader = torch.utils.data.DataLoader(Arrays(arrays), batch_size=size)
    return {"x": loader}


def as_py_dataset(arrays, size):
    return {"x": Py(arrays, size)}


def as_tf_data(arrays, size):
    tf = pytest.importorskip("tensorflow")
    return {"x": tf.data.Dataset.from_tensor_slices(tuple(arrays)).batch(size)}


def as_generator(arrays, size):
    return {"x": (batch for batch in iter_batches(arrays, size))}


def iter_batches(arrays, size):
    for begin in range(0, len(arrays[0]), size):
        yield tuple(array[begin : begin + size] for array in arrays)


KINDS = [as_arrays, as_loader, as_py_dataset, as_tf_data, as_generator]


def run(arrays, kind, size):
    """Trains, evaluates and predicts; returns all that comes out."""
    model = network()
    epochs = 1 if kind is as_generator else 2
    # Others have an order of their own; a PyDataset's would depend on how many
    # batches a process has.
    can_shuffle = kind in (as_arrays, as_py_dataset)
    arguments = {"shuffle": False} if can_shuffle else {}
    with warnings.catch_warnings():
        # Keras's, at the end of a generator: ran out of data.
        warnings.filterwarnings("ignore", "Your input ran out of data")
        history = model.fit(
            **kind(arrays, size), epochs=epochs, verbose=0, **arguments
        ).history
        evaluated = model.evaluate(**kind(arrays, size), verbose=0)
        predicting = kind(arrays[:1], size)
        predicted = model.predict(**predicting, verbose=0)
    return (
        history["loss"],
        history["mae"],
        evaluated,
        predicted,
        harness.weights_of(model),
    )


def assert_equal(found, expected):
    for a, b in zip(found[:-1], expected[:-1], strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
    for path, value in expected[-1].items():
        np.testing.assert_allclose(
            found[-1][path], value, rtol=1e-5, atol=1e-5, err_msg=path
        )


# 8: parts are equal; 11: the last are of 2 and 1; 9: of 1 and 0, so that a
# process has a batch less than another.
@pytest.mark.parametrize("count", [8, 11, 9])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__[3:])
def test_parts_train_as_the_global_batch_does(kind, count):
    arrays = samples(count)
    harness.assert_plain()
    expected = run(arrays, kind, BATCH)
    current = model_parallel()
    own = rows_of_part(count, current.data_shard_id)
    with current.scope():
        found = run([array[own] for array in arrays], kind, BATCH // 2)
    assert_equal(found, expected)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__[3:])
def test_by_default_every_process_is_given_the_global_batch(kind):
    arrays = samples(11)
    expected = run(arrays, kind, BATCH)
    with model_parallel(auto_shard_dataset=True).scope():
        found = run(arrays, kind, BATCH)
    assert_equal(found, expected)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__[3:])
def test_an_iterator_of_batches_without_a_model_takes_any_data(kind):
    with model_parallel(auto_shard_dataset=True).scope():
        iterator = EpochIterator(**kind(samples(8), 4))
        sizes = [len(batch[0]) for *_, batches in iterator for batch in batches]
    assert sizes == [4, 4]


def test_data_parallel_parts_with_a_sampler_of_torch():
    """Each process loads its own rows, and no other."""
    arrays = samples(4 * WORLD)
    current = distribution.DataParallel(auto_shard_dataset=False)
    data = Arrays(arrays)
    sampler = torch.utils.data.DistributedSampler(
        data,
        num_replicas=current.num_model_replicas,
        rank=current.data_shard_id,
        shuffle=False,
    )
    loader = torch.utils.data.DataLoader(data, batch_size=2, sampler=sampler)
    # The sampler deals rows out one by one.
    order = [
        row
        for step in range(2)
        for part in range(WORLD)
        for row in (part + 2 * step * WORLD, part + (2 * step + 1) * WORLD)
    ]
    model = network()
    expected = model.fit(
        *(array[order] for array in arrays[:2]),
        sample_weight=arrays[2][order],
        batch_size=2 * WORLD,
        epochs=2,
        shuffle=False,
        verbose=0,
    )
    with current.scope():
        model = network()
        found = model.fit(loader, epochs=2, verbose=0)
    np.testing.assert_allclose(
        found.history["loss"], expected.history["loss"], rtol=1e-5
    )
    assert data.loaded == set(range(RANK, 4 * WORLD, WORLD))


def test_validation_on_parts():
    arrays, others = samples(8), samples(11)
    expected = network().fit(
        **as_arrays(arrays, BATCH),
        validation_data=others,
        epochs=2,
        shuffle=False,
        verbose=0,
    )
    current = model_parallel()
    own = [rows_of_part(n, current.data_shard_id) for n in (8, 11)]
    with current.scope():
        found = network().fit(
            **as_arrays([array[own[0]] for array in arrays], BATCH // 2),
            validation_data=tuple(array[own[1]] for array in others),
            epochs=2,
            shuffle=False,
            verbose=0,
        )
    for name, values in expected.history.items():
        np.testing.assert_allclose(
            found.history[name], values, rtol=1e-5, err_msg=name
        )


@pytest.mark.parametrize("count", [4, 3])
def test_single_batches_are_parts_too(count):
    x, y, weight = samples(count)

    def steps(x, y, weight):
        model = network()
        losses = [model.train_on_batch(x, y, weight) for _ in range(3)]
        return losses, model.test_on_batch(x, y), model.predict_on_batch(x)

    expected = steps(x, y, weight)
    current = model_parallel()
    own = rows_of_part(count, current.data_shard_id)
    with current.scope():
        found = steps(x[own], y[own], weight[own])
    for a, b in zip(found, expected):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def test_steps_of_a_dataset_without_end():
    """An epoch goes on where the last one ended."""
    arrays = samples(8)

    def endless(rows, size):
        while True:
            yield from iter_batches([a[rows] for a in arrays], size)

    def fit(rows, size):
        history = network().fit(
            endless(rows, size), steps_per_epoch=3, epochs=2, verbose=0
        )
        return history.history["loss"]

    expected = fit(range(8), BATCH)
    current = model_parallel()
    own = rows_of_part(8, current.data_shard_id)
    with current.scope():
        found = fit(own, BATCH // 2)
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_tokens_in_parts_of_different_lengths():
    """Integers and a structure of inputs, gathered for the last batch."""

    def build():
        keras.utils.set_random_seed(1)
        tokens = keras.Input((3,), dtype="int32", name="tokens")
        more = keras.Input((FEATURES,), name="more")
        x = layers.Embedding(10, 8, name="up")(tokens)
        x = layers.Concatenate()([layers.Flatten()(x), more])
        model = keras.Model({"tokens": tokens, "more": more}, x)
        x = layers.Dense(4, name="down")(x)
        model = keras.Model({"tokens": tokens, "more": more}, x)
        model.compile(
            keras.optimizers.SGD(0.1),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        )
        return model

    rng = np.random.default_rng(0)
    inputs = {
        "tokens": rng.integers(0, 10, (7, 3)).astype("int32"),
        "more": rng.standard_normal((7, FEATURES), "float32"),
    }
    y = rng.integers(0, 4, 7)

    def fit(rows, size):
        history = build().fit(
            {name: array[rows] for name, array in inputs.items()},
            y[rows],
            class_weight={0: 1.0, 1: 2.0, 2: 0.5, 3: 1.0},
            batch_size=size,
            epochs=3,
            shuffle=False,
            verbose=0,
        )
        return history.history["loss"]

    expected = fit(range(7), BATCH)
    current = model_parallel(layouts={".*up/embeddings": (None, "model")})
    own = rows_of_part(7, current.data_shard_id)
    with current.scope():
        found = fit(own, BATCH // 2)
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_without_a_data_axis_a_part_is_the_whole():
    x, y, _ = samples(8)
    expected = network().fit(x, y, batch_size=BATCH, verbose=0, shuffle=False)
    with model_parallel(data=1).scope():
        model = network()
        found = model.fit(x, y, batch_size=BATCH, verbose=0, shuffle=False)
        with pytest.raises(ValueError, match="this run hold different batches"):
            model.fit(x + RANK, y, batch_size=BATCH, verbose=0)
    np.testing.assert_allclose(
        found.history["loss"], expected.history["loss"], rtol=1e-5
    )


def test_whose_part_it_is():
    current = model_parallel()
    assert (current.num_processes, current.num_model_replicas) == (WORLD, 2)
    assert current.data_shard_id == RANK // (WORLD // 2)
    # One model over all processes: they are all given the same.
    assert model_parallel(data=1).data_shard_id == 0


def test_what_keras_shards_is_a_part():
    tf = pytest.importorskip("tensorflow")
    x, y, _ = samples(8)
    expected = network().fit(x, y, batch_size=BATCH, verbose=0, shuffle=False)
    current = model_parallel(auto_shard_dataset=True)
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH)
    own = current.distribute_dataset(data)
    assert [len(batch) for batch, _ in own] == [BATCH // 2] * 2
    with current.scope():
        model = network()
        with pytest.raises(ValueError, match="auto_shard_dataset=False"):
            model.fit(own, verbose=0)
        current.auto_shard_dataset = False
        found = network().fit(own, verbose=0)
    np.testing.assert_allclose(
        found.history["loss"], expected.history["loss"], rtol=1e-5
    )


def test_a_model_that_was_built_with_another_seed_in_each_process():
    """Its parts would be those of different models."""
    keras.utils.set_random_seed(RANK)
    model = keras.Sequential([keras.Input((6,)), layers.Dense(8, name="up")])
    keras.utils.set_random_seed(1)
    before = model.get_weights()
    layout_map = distribution.LayoutMap(harness.mesh((1, WORLD)))
    layout_map["up/kernel"] = (None, "model")
    with pytest.raises(
        ValueError, match="different values of '.*up/kernel'.*same seed"
    ):
        distribution.distribute_model(
            model, distribution.ModelParallel(layout_map=layout_map)
        )
    for value, after in zip(before, model.get_weights()):
        np.testing.assert_array_equal(value, after)


def test_different_batches_after_the_scope_of_a_model_that_is_not_built():
    """Each process would train a model of its own."""
    with distribution.TensorParallel().scope():
        model = keras.Sequential(
            [layers.Dense(8, activation="gelu"), layers.Dense(4)]
        )
        model.compile("sgd", "mse")
    x = np.full((4, 6), 1.0 + RANK, "float32")
    with pytest.raises(ValueError, match="this run hold different batches"):
        model.fit(x, np.ones((4, 4)), verbose=0)


# What processes hold differently -> what the error says in all of them.


@pytest.mark.skipif(WORLD < 4, reason="a model group of several processes")
def test_different_batches_in_one_model_group():
    current = model_parallel()
    x, y, _ = samples(8)
    with current.scope():
        model = network()
        # The parts of the groups differ, and so they should.
        model.fit(x + current.data_shard_id, y, verbose=0)
        with pytest.raises(
            ValueError,
            match=r"one model group hold different batches.*"
            r"\{0: 0, 1: 0, 2: 1, 3: 1\}",
        ):
            model.fit(x + (RANK == 3), y, verbose=0)
        model.fit(x + current.data_shard_id, y, verbose=0)


def test_the_same_part_everywhere_is_a_warning():
    x, y, _ = samples(8)
    with model_parallel().scope():
        model = network()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model.fit(x, y, verbose=0)
    found = [w for w in caught if "begin with the same batch" in str(w.message)]
    assert bool(found) == (RANK == 0)


def test_global_batches_of_different_number():
    x, y, _ = samples(12)
    count = 8 if RANK else 12
    with model_parallel(auto_shard_dataset=True).scope():
        with pytest.raises(ValueError, match=r"0: \(False, 3\), 1: \(False, 2"):
            network().fit(x[:count], y[:count], batch_size=BATCH, verbose=0)


def test_parts_in_one_process_and_the_whole_in_another():
    x, y, _ = samples(8)
    with model_parallel(auto_shard_dataset=RANK == 0).scope():
        with pytest.raises(ValueError, match=r"0: \(False, 1\), 1: \(True, 1"):
            network().fit(x, y, verbose=0)


def test_parts_that_do_not_fit_together():
    def build():
        keras.utils.set_random_seed(1)
        inputs = keras.Input((None, FEATURES))
        model = keras.Model(inputs, layers.Dense(OUTPUTS)(inputs))
        model.compile("sgd", "mse")
        return model

    current = model_parallel()
    own = current.data_shard_id
    x = np.full((4, 3 + own, FEATURES), own, "float32")
    with current.scope():
        with pytest.raises(ValueError, match=r"\(3, 6\).*\(4, 6\)"):
            build().predict(x, verbose=0)
        with pytest.raises(ValueError, match="float32.*float64"):
            build().predict_on_batch(
                np.zeros((4, 3, FEATURES), ("float32", "float64")[own])
            )


def fit_with(auto_shard_dataset=True, layouts=LAYOUTS, **arguments):
    x, y, _ = samples(8)
    with model_parallel(auto_shard_dataset, layouts=layouts).scope():
        model = network(**arguments)
        model.fit(x, y, batch_size=BATCH, verbose=0)


@pytest.mark.parametrize(
    "different, messages",
    [
        ({"up": 24}, ["'up/kernel' of shape (6, 16)", "(6, 24)"]),
        ({"name": "over"}, ["'up/kernel'", "'over/kernel'"]),
        ({"dtype": "bfloat16"}, ["'up/kernel'", "float32", "bfloat16"]),
        (
            {"layouts": {**LAYOUTS, ".*down/kernel": (None, None)}},
            ["'down/kernel'", "('model', None)", "(None, None)"],
        ),
        (
            {"layouts": {**LAYOUTS, ".*up/bias": (None,)}},
            ["'up/bias'", "('model',)", "(None,)"],
        ),
        ({"loss": "mse", "optimizer": "adam"}, ["SGD", "Adam"]),
    ],
    ids=["shape", "name", "dtype", "layout", "bias", "optimizer"],
)
def test_different_models(different, messages, monkeypatch):
    arguments = different if RANK == 1 else {}
    if "optimizer" in different:
        arguments = {}
        if RANK == 1:
            monkeypatch.setattr(
                keras.optimizers, "SGD", lambda rate: keras.optimizers.Adam()
            )
    with pytest.raises(ValueError, match="hold different models") as caught:
        fit_with(**arguments)
    message = str(caught.value)
    for text in messages:
        assert text in message, message
    others = [index for index in range(WORLD) if index != 1]
    assert f"in process(es) {others};" in message
    assert message.endswith("in process(es) [1]")


@pytest.mark.parametrize("entry", ["evaluate", "predict", "train_on_batch"])
def test_different_models_in_other_calls(entry):
    x, y, _ = samples(8)
    with model_parallel(auto_shard_dataset=True).scope():
        model = network(up=16 if RANK else 24)
        with pytest.raises(ValueError, match=r"different models.*\(6, 24\)"):
            if entry == "predict":
                model.predict(x, verbose=0)
            else:
                getattr(model, entry)(x, y)


def test_different_meshes(monkeypatch):
    # As in a fresh process.
    monkeypatch.setattr(placement, "_meshes", {})
    mesh = harness.mesh((WORLD, 1) if RANK else (1, WORLD))
    current = distribution.DataParallel(mesh)
    with current.scope():
        with pytest.raises(ValueError, match="hold different meshes"):
            network()


def test_different_axes_of_batches():
    """On one mesh, so that building the model shows nothing yet."""
    x, y, _ = samples(8)
    layout_map = distribution.LayoutMap(harness.mesh((2, WORLD // 2)))
    layout_map[".*up/kernel"] = (None, None)
    current = distribution.ModelParallel(
        layout_map=layout_map, batch_dim_name="model" if RANK else "batch"
    )
    with current.scope():
        model = network()
        with pytest.raises(ValueError, match="over 'batch' in process"):
            model.fit(x, y, verbose=0)


@pytest.mark.skipif(WORLD > 2, reason="takes minutes: two are enough")
def test_compiled_steps_lose_as_eager_ones_do():
    """On parts; `torch_models_test.py` has split variables."""
    try:
        compiling.check_compiler()
    except RuntimeError as e:
        pytest.skip(str(e))
    x, y, _ = samples(8)
    current = distribution.DataParallel(auto_shard_dataset=False)
    own = rows_of_part(8, current.data_shard_id)

    def fit(**arguments):
        keras.utils.set_random_seed(1)
        with current.scope():
            model = keras.Sequential(
                [keras.Input((FEATURES,)), layers.Dense(OUTPUTS)]
            )
            model.compile(keras.optimizers.SGD(0.1), "mse", **arguments)
            history = model.fit(
                x[own],
                y[own],
                batch_size=BATCH // 2,
                epochs=3,
                shuffle=False,
                verbose=0,
            )
        return history.history["loss"]

    np.testing.assert_allclose(
        fit(jit_compile=True), fit(jit_compile=False), rtol=1e-5
    )


def test_callbacks_run_in_the_loop():
    """In threads they could gather while the next step does."""
    with model_parallel().scope():
        model = keras.Sequential([layers.Input((2,)), layers.Dense(2)])
        callbacks = keras.callbacks.CallbackList(model=model)
        callbacks.on_train_begin()
    assert not callbacks._async_train
    assert not callbacks._async_predict
