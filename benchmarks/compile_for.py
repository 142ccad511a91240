"""Compiles train steps of KerasHub's models for H100 and TPU v5e, without them.

    pip install '.[jax,hub,ahead]'
    python benchmarks/compile_for.py                       # all; about an hour
    python benchmarks/compile_for.py --models GPT-2 --targets h100

Widths are those of the released models, depths by the law of two shallow ones.
Results are kept in `compile_for.json`, so a run can be stopped and goes on with
the rest; `compile_for_page.py` writes `compile_for.md` from it. `--check`
compiles a third depth, `--maps` with the layout maps of KerasHub: both stand
beside the rows of the same models.
`--plans` plans the models of known rows again, and compiles nothing.
"""

import argparse
import datetime
import functools
import importlib.metadata
import json
import os
import pathlib
import re
from unittest import mock

os.environ["KERAS_BACKEND"] = "jax"
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import compile_for_page
import jax
import keras
import keras_hub
from keras.src.backend.jax import nn as keras_nn

from keras_tp import distribution

FOLDER = pathlib.Path(__file__).parent
RESULTS = FOLDER / "compile_for.json"
TABLE = FOLDER / "compile_for.md"
PACKAGES = "keras", "keras-hub", "jax", "libtpu"
DTYPE = "mixed_bfloat16"
LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
# All-reduces of a dense block in a step: after attention and after the
# feed-forward network, and of the gradients of their inputs.
PER_BLOCK = 4


def causal_lm(name, **config):
    """Returns a function of the depth that builds a language model."""
    backbone = getattr(keras_hub.models, f"{name}Backbone")
    task = getattr(keras_hub.models, f"{name}CausalLM")

    def build(depth, dtype=DTYPE):
        return task(
            backbone=backbone(num_layers=depth, dtype=dtype, **config),
            preprocessor=None,
        )

    return build


def vit(depth):
    """Returns a ViT-L/16 classifier."""
    backbone = keras_hub.models.ViTBackbone(
        image_shape=(224, 224, 3),
        patch_size=16,
        num_layers=depth,
        num_heads=16,
        hidden_dim=1024,
        mlp_dim=4096,
        dtype=DTYPE,
    )
    return keras_hub.models.ViTImageClassifier(
        backbone, num_classes=1000, preprocessor=None, dtype=DTYPE
    )


def whisper(depth):
    """Returns Whisper medium with its tied head over the vocabulary."""
    backbone = keras_hub.models.WhisperBackbone(
        vocabulary_size=51865,
        num_layers=depth,
        num_heads=16,
        hidden_dim=1024,
        intermediate_dim=4096,
        max_encoder_sequence_length=3000,
        max_decoder_sequence_length=448,
        dtype=DTYPE,
    )
    table = backbone.decoder_embeddings.token_embedding
    hidden = backbone.output["decoder_sequence_output"]
    return keras.Model(backbone.input, table(hidden, reverse=True))


WHISPER_INPUTS = {
    "encoder_features": (None, 3000, 80),
    "decoder_token_ids": keras.KerasTensor((None, 448), "int32"),
    "decoder_padding_mask": keras.KerasTensor((None, 448), "int32"),
}
LLAMA_8B = causal_lm(
    "Llama3",
    vocabulary_size=128256,
    num_query_heads=32,
    num_key_value_heads=8,
    hidden_dim=4096,
    intermediate_dim=14336,
    rope_max_wavelength=500000,
)
LLAMA_70B = causal_lm(
    "Llama3",
    vocabulary_size=128256,
    num_query_heads=64,
    num_key_value_heads=8,
    hidden_dim=8192,
    intermediate_dim=28672,
    rope_max_wavelength=500000,
)
# Name -> function, depth, batch size, length, all-reduces of a layer, mesh.
MODELS = {
    "Llama 3 8B": (LLAMA_8B, 32, 8, 2048, PER_BLOCK, (1, 8)),
    "GPT-2 medium": (
        causal_lm(
            "GPT2",
            vocabulary_size=50257,
            num_heads=16,
            hidden_dim=1024,
            intermediate_dim=4096,
            max_sequence_length=1024,
            dropout=0.1,
        ),
        24,
        16,
        1024,
        PER_BLOCK,
        (1, 8),
    ),
    "ViT-L/16": (vit, 24, 64, None, PER_BLOCK, (1, 8)),
    "Gemma 3 12B": (
        causal_lm(
            "Gemma3",
            vocabulary_size=262208,
            image_size=896,
            num_query_heads=16,
            num_key_value_heads=8,
            hidden_dim=3840,
            intermediate_dim=15360,
            head_dim=256,
            use_sliding_window_attention=True,
            sliding_window_size=1024,
            vision_encoder=None,
        ),
        48,
        8,
        2048,
        PER_BLOCK,
        (1, 8),
    ),
    "Mixtral 8x7B": (
        causal_lm(
            "Mixtral",
            vocabulary_size=32000,
            num_query_heads=32,
            num_key_value_heads=8,
            hidden_dim=4096,
            intermediate_dim=14336,
            num_experts=8,
            top_k=2,
        ),
        32,
        8,
        2048,
        PER_BLOCK,
        (1, 8),
    ),
    "Gemma 7B": (
        causal_lm(
            "Gemma",
            vocabulary_size=256000,
            num_query_heads=16,
            num_key_value_heads=16,
            hidden_dim=3072,
            intermediate_dim=49152,
            head_dim=256,
        ),
        28,
        8,
        2048,
        PER_BLOCK,
        (1, 8),
    ),
    "Qwen 2.5 32B": (
        causal_lm(
            "Qwen",
            vocabulary_size=152064,
            num_query_heads=40,
            num_key_value_heads=8,
            hidden_dim=5120,
            intermediate_dim=27648,
            rope_max_wavelength=1000000,
        ),
        64,
        8,
        2048,
        PER_BLOCK,
        (1, 8),
    ),
    # A layer of the encoder, and one of the decoder with its two attentions.
    "Whisper medium": (whisper, 24, 16, None, PER_BLOCK + 6, (1, 8)),
    "Llama 3 70B": (LLAMA_70B, 80, 8, 2048, PER_BLOCK, (1, 8)),
    "Llama 3 70B, 64": (LLAMA_70B, 80, 64, 2048, PER_BLOCK, (8, 8)),
    "Llama 3 8B, 64": (LLAMA_8B, 32, 64, 2048, PER_BLOCK, (8, 8)),
}
INPUTS = {"Whisper medium": WHISPER_INPUTS}
TARGETS = "h100", "v5e"
# A third depth; the sixth layer of Gemma 3 is the first without a window.
CHECKED = {"h100": 6, "v5e": 3}
# Numbers of layers to compile. Programs for TPUs take minutes.
DEPTHS = {"h100": (2, 4), "v5e": (1, 2)}
# Backbones of KerasHub with a layout map.
MAPS = {
    "Llama 3 8B": "Llama3Backbone",
    "Gemma 7B": "GemmaBackbone",
    "Qwen 2.5 32B": "QwenBackbone",
}


def mesh_of(name):
    """Returns the mesh of a model; its devices need not exist."""
    shape = MODELS[name][-1]
    devices = [f"gpu:{i}" for i in range(shape[0] * shape[1])]
    return distribution.DeviceMesh(shape, ["batch", "model"], devices)


def compiled(name, target, depth=None, parallel=None):
    """Returns the report of a model, by the law or, with a depth, compiled."""
    build, own, batch_size, length, *_ = MODELS[name]
    arguments = {}
    if depth is None:
        arguments = {"depth": own, "compiled_depths": DEPTHS[target]}
    return distribution.compile_for(
        functools.partial(build, depth) if depth else build,
        parallel or distribution.TensorParallel(mesh_of(name)),
        target,
        batch_size=batch_size,
        sequence_length=length,
        loss=LOSS,
        input_spec=INPUTS.get(name),
        **arguments,
    )


def plan_of(name):
    """Returns the plan of a whole model."""
    build, depth, *_ = MODELS[name]
    return distribution.plan_sharding(
        functools.partial(build, depth), mesh_of(name), INPUTS.get(name)
    )


def forecast(name):
    """Returns what the plan of a model predicts."""
    batch_size, length = MODELS[name][2:4]
    plan = plan_of(name)
    return {
        "memory": plan.memory(batch_size, length),
        "collectives": plan.collectives(batch_size, length),
    }


def figures(report):
    """Returns a report as a row of `compile_for.json`."""
    return {
        **report.to_dict(),
        "per_layer": report.collectives_per_layer(),
        "attention_text": report.attention_text(),
        "date": datetime.date.today().isoformat(),
        "versions": {
            package: importlib.metadata.version(package)
            for package in PACKAGES
            if package != "libtpu" or report.accelerator.device_type == "tpu"
        },
    }


def measure(name, target):
    """Returns the figures of a model, compiled and predicted."""
    report = compiled(name, target)
    print(report, flush=True)
    return {
        **figures(report),
        "plan": forecast(name),
        "checked": report.at_depth(CHECKED[target]).to_dict(),
    }


def check(name, target):
    """Returns the figures of a third depth, compiled."""
    depth = CHECKED[target]
    return {
        **compiled(name, target, depth).to_dict(),
        "depth": depth,
        "date": datetime.date.today().isoformat(),
    }


def of_map(name, target):
    """Returns the figures of a model with KerasHub's own layout map.

    On GPUs, cuDNN's attention refuses some layouts. Then the model is compiled
    without it, and `alike` has the figures of the plan without it.
    """
    backbone = getattr(keras_hub.models, MAPS[name])
    layout_map = backbone.get_layout_map(mesh_of(name))
    parallel = distribution.ModelParallel(layout_map=layout_map)
    refusal, more = "", {}
    try:
        report = compiled(name, target, parallel=parallel)
    except jax.errors.JaxRuntimeError as e:
        (refusal,) = re.findall("^ValueError: (.*)", str(e), re.MULTILINE)
        with without_flash_attention():
            report = compiled(name, target, parallel=parallel)
        more["alike"] = alike(name, target)
    print(report, flush=True)
    worse = plan_of(name).compare(layout_map)
    return {**figures(report), "worse": worse, "refused": refusal, **more}


def alike(name, target):
    """Returns the figures of a model with its plan, without flash attention."""
    with without_flash_attention():
        return figures(compiled(name, target))


def without_flash_attention():
    """Context in which attention is matmuls and a softmax.

    `keras.config.disable_flash_attention` is for Keras's own layers only.
    """
    return mock.patch.object(
        keras_nn, "_can_use_flash_attention", return_value=False
    )


def read():
    """Returns the rows that are there, by key."""
    return json.loads(RESULTS.read_text()) if RESULTS.exists() else {}


def write(row):
    """Writes the rows with another one, a dict of its key, and the page."""
    # Another run may have added rows meanwhile.
    results = {**read(), **row}
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    theory = {name: row[-2] for name, row in MODELS.items()}
    TABLE.write_text(compile_for_page.text(results, theory))


def main():
    """Compiles what is asked for and is not done yet, and writes the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--models", nargs="*", choices=MODELS)
    add("--targets", nargs="*", default=TARGETS)
    add("--again", action="store_true", help="compile known rows again")
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--check", action="store_true", help="a third depth")
    kind.add_argument("--maps", action="store_true", help="KerasHub's maps")
    kind.add_argument("--plans", action="store_true", help="only plan again")
    chosen = parser.parse_args()
    make, suffix = measure, ""
    if chosen.check:
        make, suffix = check, "/check"
    elif chosen.maps:
        make, suffix = of_map, "/map"
    for name in chosen.models or (MAPS if chosen.maps else MODELS):
        predicted = forecast(name) if chosen.plans else None
        for target in chosen.targets:
            key = f"{name}/{target}{suffix}"
            known = read().get(key)
            if chosen.plans and known:
                write({key: {**known, "plan": predicted}})
            elif not chosen.plans and (chosen.again or not known):
                write({key: make(name, target)})
    write({})


if __name__ == "__main__":
    main()
