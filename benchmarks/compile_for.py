"""Compiles train steps of KerasHub's models for H100 and TPU v5e, without them.

    pip install '.[jax,hub,ahead]'
    python benchmarks/compile_for.py                       # all; about an hour
    python benchmarks/compile_for.py --models GPT-2 --targets h100

Widths are those of the released models, depths by the law of two shallow ones.
Results are kept in `compile_for.json`, so a run can be stopped and goes on with
the rest; `compile_for.md` is written from it. `--check` also compiles a third
depth, and prints how far the law is from it.
"""

import argparse
import datetime
import functools
import json
import os
import pathlib

os.environ["KERAS_BACKEND"] = "jax"
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import keras_hub

from keras_tp import distribution

FOLDER = pathlib.Path(__file__).parent
RESULTS = FOLDER / "compile_for.json"
TABLE = FOLDER / "compile_for.md"
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
    # A layer of the encoder, and one of the decoder with its two attentions.
    "Whisper medium": (whisper, 24, 16, None, PER_BLOCK + 6, (1, 8)),
    "Llama 3 70B": (LLAMA_70B, 80, 8, 2048, PER_BLOCK, (1, 8)),
    "Llama 3 70B, 64": (LLAMA_70B, 80, 64, 2048, PER_BLOCK, (8, 8)),
    "Llama 3 8B, 64": (LLAMA_8B, 32, 64, 2048, PER_BLOCK, (8, 8)),
}
INPUTS = {"Whisper medium": WHISPER_INPUTS}
TARGETS = "h100", "v5e"
CHECKED_DEPTH = 6


def mesh_of(name):
    """Returns the mesh of a model; its devices need not exist."""
    shape = MODELS[name][-1]
    devices = [f"gpu:{i}" for i in range(shape[0] * shape[1])]
    return distribution.DeviceMesh(shape, ["batch", "model"], devices)


def compiled(name, target, depth=None):
    """Returns the report of a model, by the law or, with a depth, compiled."""
    build, own, batch_size, length, *_ = MODELS[name]
    spec = INPUTS.get(name)
    arguments = {} if depth else {"depth": own}
    return distribution.compile_for(
        functools.partial(build, depth) if depth else build,
        distribution.TensorParallel(mesh_of(name)),
        target,
        batch_size=batch_size,
        sequence_length=length,
        loss=LOSS,
        input_spec=spec,
        **arguments,
    )


def measure(name, target):
    """Returns a row of `compile_for.json`."""
    report = compiled(name, target)
    print(report, flush=True)
    build, depth, batch_size, length, *_ = MODELS[name]
    plan = distribution.plan_sharding(
        functools.partial(build, depth), mesh_of(name), INPUTS.get(name)
    )
    return {
        **report.to_dict(),
        "per_layer": report.collectives_per_layer(),
        "attention_text": report.attention_text(),
        "plan": {
            "memory": plan.memory(batch_size, length),
            "collectives": plan.collectives(batch_size, length),
        },
        "date": datetime.date.today().isoformat(),
    }


def check(name, target, depth):
    """Returns the figures of a third depth: by the law, and compiled."""
    law = compiled(name, target).at_depth(depth)
    real = compiled(name, target, depth)
    return {
        "depth": depth,
        "law": law.to_dict(),
        "compiled": real.to_dict(),
        "date": datetime.date.today().isoformat(),
    }


def kinds(counts):
    """Returns counts of collectives as text."""
    found = [f"{count:g} {kind}" for kind, count in counts.items() if count]
    return ", ".join(found).replace("_", "-") or "none"


def line(name, row):
    """Returns a row of the table of `compile_for.md`."""
    theory = MODELS[name][-2]
    layers, memory = row["depth"], row["memory"]
    rest = {
        kind: found["count"] - layers * row["per_layer"].get(kind, 0)
        for kind, found in row["collectives"].items()
    }
    seconds = row["seconds"]
    started = sum(v["beside"] for v in row["collectives"].values())
    operations = sum(v["operations"] for v in row["collectives"].values())
    length = row["sequence_length"]
    cells = (
        name.partition(",")[0],
        f"{row['mesh']['batch']} x {row['mesh']['model']} {row['target']}",
        str(row["batch_size"]) + (f" x {length}" if length else ""),
        kinds(row["per_layer"]),
        theory,
        kinds(rest),
        f"{sum(v['bytes'] for v in row['collectives'].values()) / 2**30:.2f}",
        f"{started} of {operations}",
        " + ".join(
            f"{memory[kind] / 2**30:.1f}"
            for kind in ("arguments", "temporaries")
        ),
        f"{memory['peak'] / 2**30:.1f} of {row['memory_limit'] / 2**30:.1f}",
        "yes" if row["fits"] else "no",
        f"{row['plan']['memory']['total'] / 2**30:.1f}",
        f"{sum(row['flops'].values()) / 1e12:.1f}",
        f"{1000 * seconds['step']:.0f}",
        f"{row['communication_share']:.0%}",
        row["attention_text"],
        f"{row['compile_seconds']:.0f}",
    )
    return "| " + " | ".join(map(str, cells)) + " |"


HEADINGS = (
    "model",
    "mesh",
    "batch",
    "collectives of a layer",
    "in theory",
    "of the rest",
    "GiB sent",
    "beside computations",
    "arguments + temporaries, GiB",
    "peak, GiB",
    "fits",
    "plan's forecast, GiB",
    "TFLOPs",
    "step, ms",
    "waits",
    "attention",
    "seconds to compile",
)


def write_table(results):
    """Writes `compile_for.md` from the rows of `compile_for.json`."""
    dates = sorted({row["date"] for row in results.values()})
    text = [
        "# Train steps compiled for accelerators that are not there",
        "",
        "Written by `python benchmarks/compile_for.py` on",
        f"{' and '.join(dates)}, on 2 shared cores without an accelerator;",
        "keras 3.15.1, keras-hub 0.32.0, jax 0.10.2, libtpu 0.0.42.1. Mixed",
        "bfloat16, Adam, sparse cross-entropy. Counts, bytes, memory and FLOPs",
        "are of one device, in the program that XLA compiled, by the law of 2",
        "and 4 layers. The step is a lower limit (a roofline from published",
        "peak figures), `waits` the share of it in which communication is not",
        "hidden. The forecast is `plan.memory`. On a mesh with several",
        "replicas, the collectives of a layer have its gradients too, some of",
        "them in one tensor; the 4 of theory are those of the split.",
        "",
        "| " + " | ".join(HEADINGS) + " |",
        "|" + "---|" * len(HEADINGS),
    ]
    rows = {k: row for k, row in results.items() if "law" not in row}
    text += [line(key.split("/")[0], row) for key, row in rows.items()]
    text += [
        "",
        "## The law against a third depth",
        "",
        "| model | target | layers | collectives | sent | arguments |"
        " temporaries | peak | FLOPs |",
        "|" + "---|" * 9,
    ]
    for key, row in results.items():
        if "law" in row:
            text.append(check_line(key.split("/")[0], row))
    TABLE.write_text("\n".join(text) + "\n")


def check_line(name, row):
    """Returns a row of the second table: law / compiled, and the difference."""
    law, real = row["law"], row["compiled"]

    def pair(get, unit, text):
        left, right = get(law) / unit, get(real) / unit
        return f"{left:{text}} / {right:{text}} ({left / right - 1:+.1%})"

    def sent(key):
        return lambda r: sum(v[key] for v in r["collectives"].values())

    cells = [
        name,
        law["target"],
        row["depth"],
        pair(sent("count"), 1, ".0f"),
        pair(sent("bytes"), 2**20, ".1f"),
        *(
            pair(lambda r, n=n: r["memory"][n], 2**20, ".0f")
            for n in ("arguments", "temporaries", "peak")
        ),
        pair(lambda r: sum(r["flops"].values()), 1e12, ".3f"),
    ]
    return "| " + " | ".join(map(str, cells)) + " |"


def main():
    """Compiles what is asked for and is not done yet, and writes the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--models", nargs="*", default=list(MODELS))
    add("--targets", nargs="*", default=TARGETS)
    add("--check", action="store_true", help="compile a third depth")
    chosen = parser.parse_args()
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for name in chosen.models:
        for target in chosen.targets:
            key = f"{name}/{target}"
            if chosen.check:
                key += "/check"
            if key in results:
                continue
            if chosen.check:
                results[key] = check(name, target, CHECKED_DEPTH)
            else:
                results[key] = measure(name, target)
            RESULTS.write_text(json.dumps(results, indent=1))
            write_table(results)
    write_table(results)


if __name__ == "__main__":
    main()
