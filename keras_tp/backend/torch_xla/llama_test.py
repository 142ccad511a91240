"""Llama on all devices: its layouts, its numbers, and what it sends."""

import functools

import keras
import keras_hub as hub
import numpy as np
import pytest

from keras_tp import backend
from keras_tp import distribution

WORDS, LAYERS, WIDTH, HIDDEN, HEADS = 96, 2, 64, 256, 8
BATCH, LENGTH = 4, 12
DEVICES = distribution.get_device_count()

# Kernels are (in, out), and with heads (in, heads, size), (heads, size, out).
TABLE = {
    "token_embedding/embeddings": ("model", None),
    "self_attention/query/kernel": (None, "model", None),
    "self_attention/key/kernel": (None, "model", None),
    "self_attention/value/kernel": (None, "model", None),
    "self_attention/attention_output/kernel": ("model", None, None),
    "feedforward_gate_dense/kernel": (None, "model"),
    "feedforward_intermediate_dense/kernel": (None, "model"),
    "feedforward_output_dense/kernel": ("model", None),
    "token_embedding/reverse_embeddings": (None, "model"),
}
NAMES = {
    "embedding": 1,
    "query": LAYERS,
    "key": LAYERS,
    "value": LAYERS,
    "output": LAYERS,
    "gate": LAYERS,
    "up": LAYERS,
    "down": LAYERS,
    "head": 1,
}
# Bytes of an activation between layers.
ACTIVATION = 4 * BATCH * LENGTH * WIDTH


def llama(kv_heads=HEADS):
    keras.utils.clear_session()
    keras.utils.set_random_seed(1)
    backbone = hub.models.LlamaBackbone(
        vocabulary_size=WORDS,
        num_layers=LAYERS,
        num_query_heads=HEADS,
        num_key_value_heads=kv_heads,
        hidden_dim=WIDTH,
        intermediate_dim=HIDDEN,
    )
    return hub.models.LlamaCausalLM(backbone, preprocessor=None)


def compiled(model, optimizer=None):
    model.compile(
        optimizer or keras.optimizers.SGD(0.1, momentum=0.9),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        # The accuracy of split logits gathers the best one of each device.
        weighted_metrics=[],
    )
    return model


def data():
    tokens = np.random.default_rng(0).integers(0, WORDS, (BATCH, LENGTH + 1))
    tokens = tokens.astype("int32")
    mask = np.ones((BATCH, LENGTH), "int32")
    return {"token_ids": tokens[:, :-1], "padding_mask": mask}, tokens[:, 1:]


def by_table(batch=1):
    mesh = distribution.DeviceMesh(
        (batch, DEVICES // batch), ["batch", "model"]
    )
    layout_map = distribution.LayoutMap(mesh)
    for path, axes in TABLE.items():
        layout_map[f"(.*/)?{path}"] = axes
    return distribution.ModelParallel(
        layout_map=layout_map, batch_dim_name="batch"
    )


def by_plan():
    mesh = distribution.DeviceMesh((1, DEVICES), ["batch", "model"])
    return distribution.TensorParallel(mesh)


def run(model):
    """Returns the logits, the losses of train steps, and the weights."""
    x, y = data()
    logits = model.predict_on_batch(x)
    losses = [np.ravel(model.test_on_batch(x, y))[0]]
    losses += [np.ravel(model.train_on_batch(x, y))[0] for _ in range(3)]
    weights = {v.path: keras.ops.convert_to_numpy(v) for v in model.weights}
    return logits, losses, weights


@functools.cache
def on_one_device(kv_heads=HEADS):
    return run(compiled(llama(kv_heads)))


def assert_equal(found, expected):
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(found[1], expected[1], rtol=1e-5)
    assert found[2].keys() == expected[2].keys()
    for path, value in expected[2].items():
        np.testing.assert_allclose(
            found[2][path], value, rtol=1e-5, atol=1e-5, err_msg=path
        )


def rows_of(model):
    return {
        row.path: row
        for row in distribution.describe(model).rows
        if row.role == "weight"
    }


def axes_in_table(path):
    found = [axes for end, axes in TABLE.items() if path.endswith(end)]
    return found[0] if found else None


@pytest.mark.parametrize("parallel", [by_table, by_plan])
def test_each_device_holds_its_part(parallel):
    with parallel().scope():
        model = compiled(llama())
    rows = rows_of(model)
    split = [row for row in rows.values() if row.is_split]
    assert len(split) == sum(NAMES.values())
    for path, row in rows.items():
        axes = axes_in_table(path)
        if axes is None:
            assert "layernorm" in path or "layer_norm" in path
            continue
        assert row.axes == axes
        held = dict.fromkeys(distribution.list_devices(), row.bytes // DEVICES)
        assert row.device_bytes == held
        # Read from the tensor itself.
        variable = next(v for v in model.weights if v.path == path)
        assert backend.distribution_lib.variable_axes(variable) == axes


@pytest.mark.parametrize("parallel", [by_table, by_plan])
def test_numbers_are_those_of_one_device(parallel):
    with parallel().scope():
        found = run(compiled(llama()))
    assert_equal(found, on_one_device())


def test_a_data_axis_beside_the_model_axis():
    with by_table(batch=2).scope():
        found = run(compiled(llama()))
    assert_equal(found, on_one_device())


def test_adam():
    x, y = data()

    def losses():
        model = compiled(llama(), keras.optimizers.Adam(1e-3))
        return [np.ravel(model.train_on_batch(x, y))[0] for _ in range(4)]

    expected = losses()
    with by_plan().scope():
        np.testing.assert_allclose(losses(), expected, rtol=1e-5)


@pytest.mark.parametrize("kv_heads", [1, 2])
def test_fewer_heads_of_keys_and_values_than_devices(kv_heads):
    with by_plan().scope():
        model = compiled(llama(kv_heads))
        found = run(model)
    rows = rows_of(model)
    for path, row in rows.items():
        if path.endswith(("key/kernel", "value/kernel")):
            assert not row.is_split
        elif axes_in_table(path) is not None:
            assert row.axes == axes_in_table(path)
    assert_equal(found, on_one_device(kv_heads))


def test_heads_in_groups_of_two_on_four_devices():
    if DEVICES != 4:
        pytest.skip("four heads of keys and values are for four devices")
    with by_table().scope():
        found = run(compiled(llama(4)))
    assert_equal(found, on_one_device(4))


def sums(found):
    """Returns the sums of activations, and the bytes of all other sums."""
    assert not any(found[kind].count for kind in found if kind != "all_reduce")
    count, size = found["all_reduce"]
    activations = size // ACTIVATION
    return activations, count - activations, size - activations * ACTIVATION


def test_a_forward_pass_sums_as_often_as_megatron():
    """Two in a layer (Shoeybi et al. 2019, section 3), and the lookup."""
    with by_table().scope():
        model = compiled(llama())
    x, _ = data()
    found = distribution.count_collectives(model, x)
    assert sums(found) == (2 * LAYERS + 1, 0, 0)


@pytest.mark.parametrize("parallel", [by_table, by_plan])
def test_a_step_sums_as_often_as_megatron(parallel):
    """Four in a layer, one for the lookup, and one before the head.

    The loss of split logits adds up one or two numbers of each token.
    """
    parallel = parallel()
    with parallel.scope():
        model = compiled(llama())
    x, y = data()
    found = distribution.count_collectives(model, x, y)
    activations, others, size = sums(found)
    assert activations == 4 * LAYERS + 2
    assert others <= 4 and size <= others * 4 * BATCH * LENGTH
    plan = getattr(parallel, "plan", None)
    if plan is not None:
        count, size = plan.collectives(BATCH, LENGTH)["all_reduce"]
        assert count == 4 * LAYERS + 2


def test_generated_tokens_are_those_of_one_device():
    x, _ = data()
    prompt = {**x, "padding_mask": np.tile(np.arange(LENGTH) < 4, (BATCH, 1))}
    prompt["padding_mask"] = prompt["padding_mask"].astype("int32")

    def tokens():
        model = llama()
        model.compile(sampler="greedy")
        return np.asarray(
            model.generate(prompt, stop_token_ids=None)["token_ids"]
        )

    expected = tokens()
    with by_plan().scope():
        np.testing.assert_array_equal(tokens(), expected)


def test_a_checkpoint_loads_on_one_device_and_back(tmp_path):
    path = tmp_path / "llama.safetensors"
    with by_table().scope():
        model = compiled(llama())
        run(model)
        distribution.save_checkpoint(path, model)
        expected = run(model)
    one = compiled(llama())
    distribution.load_checkpoint(path, one)
    assert_equal(run(one), expected)
    with by_plan().scope():
        again = compiled(llama())
        distribution.load_checkpoint(path, again)
        assert_equal(run(again), expected)
    assert rows_of(again)["token_embedding/embeddings"].is_split


def test_a_model_of_one_device_is_split_and_keeps_its_weights():
    model = compiled(llama())
    before = model.get_weights()
    distribution.distribute_model(model, by_table())
    for a, b in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(a, b)
    assert sum(row.is_split for row in rows_of(model).values()) == sum(
        NAMES.values()
    )
    assert_equal(run(model), on_one_device())
