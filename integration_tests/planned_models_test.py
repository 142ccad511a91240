"""Models that are split as a plan says: their numbers, and what they send."""

import keras
import keras_hub
import numpy as np
import pytest

import keras_tp
from integration_tests import harness
from integration_tests import hub_models
from integration_tests import small_models
from integration_tests import zoo
from keras_tp import distribution

TOLERANCE = 1e-5
# OPT's biases and learned positions, Llama's gates.
NAMES = ["mlp", "multi_head_attention", "opt", "llama"]


def planned(build, shape, **kwargs):
    """Returns the distribution of a plan that was made first."""
    plan = distribution.plan_sharding(build, harness.mesh(shape), **kwargs)
    return plan.distribution()


def provisional(build, shape):
    """Returns a distribution that plans the model when it is first used."""
    return distribution.TensorParallel(harness.mesh(shape))


def planned_split(parallel):
    return {row.path for row in parallel.plan.variables if row.is_split}


@pytest.mark.parametrize("how", [planned, provisional])
@pytest.mark.parametrize("name", NAMES)
@harness.shapes((1, 4), (2, 2), slow=[(1, 2)])
def test_training(name, how, shape):
    case = zoo.CASES[name]
    expected = harness.reference(name, "sgd")
    parallel = how(case.build, shape)
    with parallel.scope():
        model = harness.build(case)
    born = harness.split_paths(model)
    run = harness.train(case, model, "sgd")
    # What follows the model's last pair is next to nothing.
    assert planned_split(parallel) ^ case.split <= {"head/kernel", "head/bias"}
    assert harness.split_paths(model) == planned_split(parallel)
    rows = distribution.describe(model).rows
    held = [max(r.device_bytes.values()) for r in rows if r.role == "weight"]
    assert parallel.plan.memory(zoo.BATCH, 8)["parameters"] == sum(held)
    if how is planned:
        assert born == planned_split(parallel)
    else:
        # Never whole on one device: even what will be replicated is split.
        assert born > {p for p in case.split if p.endswith("kernel")}

    assert run.initial.keys() == expected.initial.keys()
    for path, value in run.initial.items():
        np.testing.assert_array_equal(value, expected.initial[path], path)
    found = harness.differences(run, expected)
    worst = max(found, key=found.get)
    assert harness.loss_difference(run, expected) <= TOLERANCE
    # Not one bit of difference: it was not sharded.
    assert 0 < found[worst] <= TOLERANCE, worst
    for path in case.split - case.zero_gradient:
        moved = harness.difference(run.weights[path], run.initial[path])
        assert moved >= 100 * TOLERANCE, path


def trained(build, x, y, steps=3):
    """Returns a model, and what it gave: losses, outputs and weights."""
    keras.utils.clear_session()
    keras.utils.set_random_seed(1)
    model = build()
    model.compile(keras.optimizers.SGD(0.004), "mse")
    losses = [model.train_on_batch(x, y) for _ in range(steps)]
    outputs = keras.tree.flatten(model.predict_on_batch(x))
    # Not `weights_of`: a layer that is shared without a name has no path that
    # could be relied on.
    return model, [np.asarray(losses), *outputs, *model.get_weights()]


def assert_trains_alike(build, x, y, make):
    """A model under the distribution that `make` returns, and without."""
    keras_tp.uninstall()
    harness.assert_plain()
    _, expected = trained(build, x, y)
    keras.utils.clear_session()
    with make().scope():
        model, found = trained(build, x, y)
        split = harness.split_paths(model)
    assert split
    assert len(found) == len(expected)
    losses = expected[0].reshape(len(expected[0]), -1)[:, 0]
    assert abs(losses[-1] / losses[0] - 1) > 10 * TOLERANCE
    for value, other in zip(found, expected):
        assert harness.difference(value, other) <= TOLERANCE
    return model


def floats(*shape):
    return np.random.default_rng(3).standard_normal(shape, "float32")


SMALL = {
    "shared": (small_models.shared, floats(4, 16), floats(4, 16)),
    "nested": (small_models.nested, floats(4, 16), floats(4, 16)),
    "several": (
        small_models.several,
        {"a": floats(4, 16), "b": floats(4, 12)},
        {"x": floats(4, 16), "y": floats(4, 8)},
    ),
    "with_lambda": (small_models.with_lambda, floats(4, 16), floats(4, 12)),
    "learned_queries": (
        small_models.learned_queries,
        floats(4, 16, 32),
        floats(4, 6, 32),
    ),
    "nameless": (small_models.nameless, floats(4, 6, 32), floats(4, 6, 32)),
    **{
        name: (
            small_models.blocks(getattr(small_models, name)),
            floats(4, 6, 12),
            floats(4, 6, 32),
        )
        for name in (
            "fused_own_dim",
            "fused_in_heads",
            "fused_flat",
            "merged_heads",
        )
    },
}


@pytest.mark.parametrize("name", SMALL)
def test_shapes_of_models(name):
    build, x, y = SMALL[name]
    shape = harness.fitted((1, 4))
    assert_trains_alike(build, x, y, lambda: provisional(build, shape))


def test_names_that_say_nothing():
    """A subclassed model, planned before it has any weight."""
    x = floats(4, 6, 32)
    build = small_models.Nameless
    model = assert_trains_alike(
        build,
        x,
        x,
        lambda: planned(
            build, harness.fitted((1, 4)), input_spec=(None, 6, 32)
        ),
    )
    assert len(harness.split_paths(model)) >= 6


def assert_counted_as_predicted(counted, plan, batch, length=1):
    """All-reduces as the plan says, to the byte; nothing else."""
    count, size = plan.collectives(batch, length)["all_reduce"]
    if keras.config.backend() == "jax":
        # XLA for CPUs sums the gradients of an input one by one.
        for row in plan.reductions:
            count += row.terms - 1
            size += (row.terms - 1) * row.size.at(batch, length)
    assert counted["all_reduce"] == (count, size)
    assert not any(pair[0] for k, pair in counted.items() if k != "all_reduce")


# Collectives in a step of the two blocks; each has a pair beside what is named.
PREDICTED = {
    "attention": 8,
    "gated": 8,
    "grouped": 8,
    "fused_own_dim": 8,
    "fused_in_heads": 8,
    "fused_flat": 8,
}


@pytest.mark.parametrize("name", PREDICTED)
def test_what_is_predicted_is_counted(name):
    build = small_models.blocks(getattr(small_models, name))
    shape = harness.fitted((1, 4))
    # Heads of keys that are fewer than the devices stay whole: the gradients
    # of keys and of values are summed in each of the two blocks.
    count = PREDICTED[name]
    if name == "grouped" and shape[1] == 4:
        count = 12
    parallel = planned(build, shape)
    plan = parallel.plan
    with parallel.scope():
        model = build()
        model.compile("sgd", "mse")
    x = np.ones((4, 6, 12), "float32")
    counted = distribution.count_collectives(
        model, x, np.ones((4, 6, 32), "float32")
    )
    assert plan.collectives(4)["all_reduce"][0] == count
    if plan.instead:
        # This backend does not split blocks: the attention is whole.
        assert name == "fused_flat" and counted["all_reduce"][0] == 4
        return
    assert_counted_as_predicted(counted, plan, 4)


def test_heads_merged_with_the_batch_are_gathered():
    """A limit of plans, as `docs/limits.md` says: they do not predict it."""
    build = small_models.blocks(small_models.merged_heads)
    with planned(build, harness.fitted((1, 4))).scope():
        model = build()
        model.compile("sgd", "mse")
    counted = distribution.count_collectives(
        model, floats(4, 6, 12), floats(4, 6, 32)
    )
    # In two layers; they train as on one device, see above.
    assert counted["all_gather"][0] == 8


def smollm3():
    return keras_hub.models.SmolLM3Backbone(
        vocabulary_size=64,
        hidden_dim=64,
        intermediate_dim=128,
        num_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        attention_bias=False,
        attention_dropout=0.0,
        rope_layer_enabled_list=[True, True],
        layer_types=["attention", "attention"],
        mlp_bias=False,
        layer_norm_epsilon=1e-5,
        max_position_embeddings=16,
        rope_theta=1e4,
        partial_rotary_factor=1.0,
    )


def gemma3():
    return keras_hub.models.Gemma3Backbone(
        vocabulary_size=64,
        image_size=16,
        num_layers=2,
        num_query_heads=4,
        num_key_value_heads=2,
        hidden_dim=64,
        intermediate_dim=128,
        head_dim=16,
        use_query_key_norm=True,
        vision_encoder=None,
    )


@pytest.mark.parametrize("build", [smollm3, gemma3])
def test_fewer_heads_of_keys_than_devices(build):
    """Flat projections are not cut inside of a head, or the plan says so."""
    shape = harness.fitted((1, 4))
    parallel = planned(build, shape)
    tokens = {
        "token_ids": np.arange(4 * 6).reshape(4, 6) % 64,
        "padding_mask": np.ones((4, 6), "int32"),
    }
    with parallel.scope():
        model = build()
        model.compile("sgd", "mse")
    counted = distribution.count_collectives(model, tokens, floats(4, 6, 64))
    says = "gather tensors in attention, which the plan does not predict"
    is_said = any(says in row.why for row in parallel.plan.variables)
    # Gemma's queries are reshaped to 2 x 2 heads, which 4 devices share.
    assert is_said == (build is gemma3 and shape[1] == 4)
    if is_said:
        assert counted["all_gather"][0] > 0
    else:
        assert_counted_as_predicted(counted, parallel.plan, 4, 6)


# What CI trains.
QUICK = {"opt", "llama_grouped"}


# All-reduces of a step under Megatron's map, on 2 devices: 4 for each of 2
# blocks, 1 for the tokens that are looked up, 1 for the gradient of what the
# logits are made of.
MEGATRON = {
    **dict.fromkeys(
        """albert bert bloom distil_bert falcon gemma2 gpt2 gpt_neo_x llama
        llama3 llama_grouped mistral opt phi3 qwen roberta""".split(),
        10,
    ),
    # In each block, also the gradients of one head of keys and one of values.
    "gemma": 14,
    # The router is on every device, and each has the gradient of what it gave
    # to its own experts: a number for each token and expert, in each block.
    "mixtral": 12,
    # No tokens, or none and no logits that are split; in CLIP two encoders.
    "vit": 8,
    "clip": 17,
    # 6 for a block that attends to an encoder, 1 for the gradient of what it
    # attends to, and both tables of tokens or, in Whisper, 1 of convolutions.
    "bart": 24,
    "t5": 23,
    "whisper": 23,
}
# These have 2 heads of keys: on 4 devices it is as in Gemma.
GROUPED = {"llama_grouped", "llama3", "mistral", "mixtral", "phi3", "qwen"}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in QUICK else pytest.mark.slow)
        for name in sorted(hub_models.MODELS)
    ],
)
def test_keras_hub(name):
    """All the models whose plans are kept, trained for some steps."""

    def build():
        # In a model of its own: a task of KerasHub has metrics for labels.
        task = hub_models.build(name)
        return keras.Model(task.input, task.output, name="whole")

    x, y = hub_models.data(build())
    shape = harness.fitted((1, 2))
    # Names are counted: the plan is of what is built next.
    keras.utils.clear_session()
    parallel = planned(build, shape)
    model = assert_trains_alike(build, x, y, lambda: parallel)
    assert harness.split_paths(model) == planned_split(parallel)
    if name in MEGATRON:
        # The loss is summed, too, where the logits are split.
        count = MEGATRON[name] + len(parallel.plan.split_outputs)
        count += 4 if name in GROUPED and shape[1] == 4 else 0
        if keras.config.backend() == "jax":
            # XLA for CPUs sums the gradients of an input one by one.
            count += sum(row.terms - 1 for row in parallel.plan.reductions)
        counted = distribution.count_collectives(model, x, y)
        found = {kind: pair[0] for kind, pair in counted.items() if pair[0]}
        assert found == {"all_reduce": count}
