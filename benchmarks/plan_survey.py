"""Plans the backbones of KerasHub and writes a table of what is split.

    KERAS_BACKEND=torch python benchmarks/plan_survey.py > benchmarks/plans.md

The models are tiny and nothing is trained. The plan is the same on every
backend.
"""

import collections
import functools
import re

import keras

from integration_tests import hub_models
from integration_tests.hub_models import CLASSIC
from integration_tests.hub_models import FEED_FORWARD
from integration_tests.hub_models import GROUPED
from integration_tests.hub_models import HEADS
from integration_tests.hub_models import HIDDEN
from integration_tests.hub_models import LAYERS
from integration_tests.hub_models import LENGTH
from integration_tests.hub_models import POSITIONS
from integration_tests.hub_models import TOKENS
from integration_tests.hub_models import VOCABULARY
from keras_tp import distribution

DEVICES = 4
IMAGES = {"image_shape": (32, 32, 3)}
EXPERTS = {"num_experts": 4, "top_k": 2}
VISION = {
    **IMAGES,
    "patch_size": 4,
    "num_layers": LAYERS,
    "num_heads": HEADS,
    "hidden_dim": HIDDEN,
    "intermediate_dim": FEED_FORWARD,
}
WIDTHS = {"hidden_dim": HIDDEN, "intermediate_dim": FEED_FORWARD}

# Backbones beside those of `hub_models`, whose plans are not kept as files.
MORE = {
    "DebertaV3": {**CLASSIC, **POSITIONS, "bucket_size": 8},
    "DeiT": VISION,
    "DenseNet": {**IMAGES, "stackwise_num_repeats": [2, 2]},
    "DINOV2": {**VISION, "position_embedding_shape": (32, 32, 3)},
    "Electra": {
        **{k: v for k, v in CLASSIC.items() if k != "vocabulary_size"},
        **POSITIONS,
        "vocab_size": VOCABULARY,
        "embedding_dim": 32,
    },
    "ESM": {**CLASSIC, **POSITIONS},
    "FNet": {
        **{k: v for k, v in CLASSIC.items() if k != "num_heads"},
        **POSITIONS,
    },
    "Gemma3": {**GROUPED, "image_size": 32, "head_dim": 16},
    "GptOss": {**GROUPED, **EXPERTS, "sliding_window": LENGTH},
    "Moonshine": {
        **WIDTHS,
        "vocabulary_size": VOCABULARY,
        "filter_dim": HIDDEN,
        "encoder_num_layers": LAYERS,
        "decoder_num_layers": LAYERS,
        "encoder_num_heads": HEADS,
        "decoder_num_heads": HEADS,
    },
    "Qwen3": {**GROUPED, "head_dim": 16},
    "Qwen3Moe": {**GROUPED, **EXPERTS, "moe_intermediate_dim": 128},
    "QwenMoe": {
        **GROUPED,
        **EXPERTS,
        "moe_intermediate_dim": 128,
        "shared_expert_intermediate_dim": 128,
    },
    "RoformerV2": {**CLASSIC, "head_size": HIDDEN // HEADS},
    "RWKV7": {
        **TOKENS,
        "hidden_size": HIDDEN,
        "head_size": HIDDEN // HEADS,
        "intermediate_dim": FEED_FORWARD,
    },
    "SmolLM3": {
        **TOKENS,
        **WIDTHS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": 2,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "rope_layer_enabled_list": [True] * LAYERS,
        "layer_types": ["full_attention"] * LAYERS,
        "mlp_bias": False,
        "layer_norm_epsilon": 1e-5,
        "max_position_embeddings": LENGTH,
        "rope_theta": 10000.0,
        "partial_rotary_factor": 1.0,
    },
    "SwinTransformer": {
        **IMAGES,
        "embed_dim": 32,
        "depths": [2, 2],
        "num_heads": [4, 4],
        "window_size": 4,
    },
    "VGG": {
        **IMAGES,
        "stackwise_num_repeats": [2, 2],
        "stackwise_num_filters": [32, 64],
    },
    "XLMRoberta": {**CLASSIC, **POSITIONS},
}


# Shapes of inputs that must not be as short as the planner makes them.
INPUT_SPECS = {
    "Moonshine": {
        "encoder_input_values": (None, 4096, 1),
        "encoder_padding_mask": (None, 4096),
        "decoder_token_ids": (None, LENGTH),
        "decoder_padding_mask": (None, LENGTH),
    }
}


def whole(plan):
    """Returns what is not split, by reason: paths with `#` for each number."""
    found = collections.defaultdict(dict)
    for row in plan.variables:
        if len(row.shape) > 1 and not row.is_split:
            path = re.sub(r"\d+", "#", row.path)
            why = row.why
            if row.blocks > 1:
                why = f"{row.blocks} blocks, which no Keras layout can say"
            found[why][f"`{path}`"] = None
    for kind in plan.without_rule:
        found["no rule"][kind] = None
    return "; ".join(f"{', '.join(key)}: {why}" for why, key in found.items())


def survey():
    """Returns a dict of each model's name to its plan."""
    builders = dict(hub_models.MODELS)
    for name, config in MORE.items():
        builders[name] = functools.partial(hub_models.backbone, name, **config)
    devices = [f"cpu:{i}" for i in range(DEVICES)]
    mesh = keras.distribution.DeviceMesh(
        (1, DEVICES), ["batch", "model"], devices
    )
    return {
        name: distribution.plan_sharding(
            builders[name], mesh, INPUT_SPECS.get(name)
        )
        for name in sorted(builders, key=str.lower)
    }


def not_planned(names):
    """Returns the backbones of KerasHub that have no tiny model here."""
    hub = hub_models.models()
    known = {name.replace("_", "").lower() for name in names}
    left = {}
    for name in sorted(dir(hub)):
        short = name.removesuffix("Backbone")
        if short and short != name:
            # Some have two names.
            left.setdefault(getattr(hub, name), []).append(short)
    return [
        aliases[0]
        for aliases in left.values()
        if not known & {alias.lower() for alias in aliases}
    ]


def main():
    """Prints the table."""
    plans = survey()
    print(f"# Plans of KerasHub's models on {DEVICES} devices\n")
    print("Written by `plan_survey.py`, of tiny models. The share is that of")
    print("the bytes of all matrices, kernels and embeddings; sums are those")
    print("over the devices in a training step, with the gradients'. A number")
    print("in a path is written `#`.\n")
    print("| model | split | sums | not split, and why |")
    print("| --- | --- | --- | --- |")
    for name, plan in plans.items():
        print(
            f"| {name} | {plan.split_share:.1%} | {len(plan.reductions)} | "
            f"{whole(plan)} |"
        )
    print(f"\nNot surveyed: {', '.join(not_planned(plans))}.")


if __name__ == "__main__":
    main()
