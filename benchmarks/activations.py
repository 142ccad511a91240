"""Compares a plan's estimate of activations with programs for H100.

    pip install '.[jax,hub,ahead]'
    python benchmarks/activations.py                  # all; more than an hour
    python benchmarks/activations.py --models "Llama 3 8B" --modes none blocks
    python benchmarks/activations.py --models         # the table alone

XLA reports, of the compiled train step, the most bytes on one device of all
that is neither argument nor result: its temporaries. They are compared with
`plan.memory(...)["activations"]`. Two shallow models give a law for the depth
of the released one, as in `compile_for.py`. Results are kept in
`activations.json`, so a run can be stopped; `activations.md` is written from
it, with the plans of today.
"""

import argparse
import collections
import datetime
import functools
import json
import os
import pathlib

# Chooses JAX, before Keras is imported.
import compile_for
import keras
import keras_hub

from keras_tp import distribution

FOLDER = pathlib.Path(__file__).parent
RESULTS = FOLDER / "activations.json"
TABLE = FOLDER / "activations.md"
DTYPE = compile_for.DTYPE
# The blocks of KerasHub's models.
BLOCKS = [
    f"{name}_{index}"
    for name in (
        "transformer_layer",
        "transformer_block",
        "transformer_encoder_layer",
        "transformer_decoder_layer",
        "decoder_block",
    )
    for index in range(100)
]
MODES = {
    "none": {"mode": None},
    "blocks": {"mode": "list_of_layers", "layer_names": BLOCKS},
    "full": {"mode": "full"},
    # XLA has an option for it; see `rematerialization.py`.
    "full, synchronous": {"mode": "full"},
}
SYNCHRONOUS = "allreduce,allgather,reducescatter"
# Of a shallow model in mode "full", the logits are the peak.
DEPTHS = {"full": (6, 10), "full, synchronous": (6, 10)}


class Case(
    collections.namedtuple(
        "Case", "build depth batch length count inputs", defaults=[None]
    )
):
    """A model and its batch.

    Args:
        build: Function of the depth that builds it.
        depth: Int, the number of layers of the released model.
        batch: Int, the batch size.
        length: Int or `None`, the sequence length.
        count: Int, the number of devices, all of them on the model axis.
        inputs: As `input_spec` of `plan_sharding`. Defaults to `None`.
    """


def bert(depth):
    """Returns BERT large, with its dropout, as a classifier."""
    backbone = keras_hub.models.BertBackbone(
        vocabulary_size=30522,
        num_layers=depth,
        num_heads=16,
        hidden_dim=1024,
        intermediate_dim=4096,
        dtype=DTYPE,
    )
    return keras_hub.models.BertTextClassifier(
        backbone, num_classes=2, preprocessor=None, dtype=DTYPE
    )


def with_head(backbone):
    """Returns an encoder and decoder with its tied head."""
    hidden = backbone.output["decoder_sequence_output"]
    logits = backbone.token_embedding(hidden, reverse=True)
    return keras.Model(backbone.input, logits)


def t5(depth):
    """Returns T5 large, with its dropout and learned biases of scores."""
    backbone = keras_hub.models.T5Backbone(
        vocabulary_size=32128,
        num_layers=depth,
        num_heads=16,
        hidden_dim=1024,
        intermediate_dim=2816,
        key_value_dim=64,
        activation="gelu",
        dtype=DTYPE,
    )
    return with_head(backbone)


def bart(depth):
    """Returns BART large, with its dropout."""
    backbone = keras_hub.models.BartBackbone(
        vocabulary_size=50265,
        num_layers=depth,
        num_heads=16,
        hidden_dim=1024,
        intermediate_dim=4096,
        dtype=DTYPE,
    )
    return with_head(backbone)


def resnet(depth):
    """Returns a ResNet with so many blocks in its third stage."""
    backbone = keras_hub.models.ResNetBackbone(
        input_conv_filters=[64],
        input_conv_kernel_sizes=[7],
        stackwise_num_filters=[64, 128, 256, 512],
        stackwise_num_blocks=[3, 4, depth, 3],
        stackwise_num_strides=[1, 2, 2, 2],
        block_type="bottleneck_block",
        image_shape=(224, 224, 3),
        dtype=DTYPE,
    )
    return keras_hub.models.ResNetImageClassifier(
        backbone, num_classes=1000, preprocessor=None, dtype=DTYPE
    )


def texts(length):
    """Returns the inputs of an encoder and a decoder."""
    return {
        f"{side}_{name}": keras.KerasTensor((None, length), "int32")
        for side in ("encoder", "decoder")
        for name in ("token_ids", "padding_mask")
    }


PHI_3 = compile_for.causal_lm(
    "Phi3",
    vocabulary_size=32064,
    hidden_dim=3072,
    intermediate_dim=8192,
    num_query_heads=32,
    num_key_value_heads=32,
)


def of_compile_for(name, count=8):
    """Returns the `Case` of one of the models of `compile_for.py`."""
    build, depth, batch, length, *_ = compile_for.MODELS[name]
    inputs = compile_for.INPUTS.get(name)
    return Case(build, depth, batch, length, count, inputs)


CASES = {
    "Llama 3 8B": of_compile_for("Llama 3 8B"),
    "Phi-3 mini": Case(PHI_3, 32, 8, 2048, 4),
    "Gemma 3 12B": of_compile_for("Gemma 3 12B"),
    "Mixtral 8x7B": of_compile_for("Mixtral 8x7B"),
    "GPT-2 medium": of_compile_for("GPT-2 medium"),
    "BERT large": Case(bert, 24, 32, 512, 4),
    "T5 large": Case(t5, 24, 16, None, 4, texts(512)),
    "BART large": Case(bart, 12, 16, None, 2, texts(1024)),
    "Whisper medium": of_compile_for("Whisper medium"),
    "ViT-L/16": of_compile_for("ViT-L/16", 4),
    "ResNet-50": Case(resnet, 6, 64, None, 2),
}


def build(name, mode, depth):
    """Returns a model in a `keras.RematScope`."""
    with keras.RematScope(**MODES[mode]):
        return CASES[name].build(depth)


def mesh_of(name):
    """Returns the mesh of a model; its devices need not exist."""
    count = CASES[name].count
    devices = [f"gpu:{i}" for i in range(count)]
    return distribution.DeviceMesh((1, count), ["batch", "model"], devices)


def measure(name, mode):
    """Returns the temporaries of the two shallow models, in bytes."""
    case = CASES[name]
    report = distribution.compile_for(
        functools.partial(build, name, mode),
        distribution.TensorParallel(mesh_of(name)),
        "h100",
        batch_size=case.batch,
        sequence_length=case.length,
        loss=compile_for.LOSS,
        input_spec=case.inputs,
        depth=case.depth,
        compiled_depths=DEPTHS.get(mode, (2, 4)),
    )
    return {
        depth: figures["memory"]["temporaries"]
        for depth, figures in report.compiled.items()
    }


def estimate(name, mode, depth):
    """Returns the plan's estimate of activations, in bytes."""
    case = CASES[name]
    plan = distribution.plan_sharding(
        functools.partial(build, name, mode, depth), mesh_of(name), case.inputs
    )
    return plan.memory(case.batch, case.length)["activations"]


def line(name, mode, row):
    """Returns a row of the table."""
    case = CASES[name]
    (low, first), (high, last) = (
        (int(depth), found) for depth, found in row["temporaries"].items()
    )
    layer = (last - first) / (high - low)
    whole = first + layer * (case.depth - low)
    own = [estimate(name, mode, depth) for depth in (low, high, case.depth)]
    own_layer = (own[1] - own[0]) / (high - low)
    cells = (
        name,
        mode,
        f"{low}, {high}",
        case.count,
        f"{case.batch} x {case.length}" if case.length else case.batch,
        f"{layer / 2**20:.1f}",
        f"{own_layer / 2**20:.1f}",
        f"{own_layer / layer - 1:+.1%}",
        f"{whole / 2**30:.2f}",
        f"{own[2] / 2**30:.2f}",
        f"{own[2] / whole - 1:+.1%}",
    )
    return "| " + " | ".join(map(str, cells)) + " |"


HEADINGS = (
    "model",
    "rematerialization",
    "depths",
    "devices",
    "batch",
    "a layer: XLA, MiB",
    "plan",
    "error",
    "the model: XLA, GiB",
    "plan",
    "error",
)


def write_table(results):
    """Writes `activations.md` from the rows of `activations.json`."""
    dates = sorted({row["date"] for row in results.values()})
    text = [
        "# Activations: a plan's estimate and the memory of programs for H100",
        "",
        "Written by `python benchmarks/activations.py`; the programs were",
        f"compiled on {' and '.join(dates)}, with keras 3.15.1, keras-hub",
        "0.32.0 and jax 0.10.2, on 2 shared cores without an accelerator.",
        "Mixed bfloat16, Adam, sparse cross-entropy; of one device. XLA's",
        "figure are the temporaries of the train step, all that is neither",
        "argument nor result. The model has the released depth, by the law of",
        "the two depths that were compiled (of an encoder and a decoder:",
        "each; of a ResNet: of its third stage).",
        "",
        "| " + " | ".join(HEADINGS) + " |",
        "|" + "---|" * len(HEADINGS),
    ]
    for name in CASES:
        for mode in MODES:
            row = results.get(f"{name}/{mode}")
            if row is not None:
                text.append(line(name, mode, row))
                print(text[-1], flush=True)
    TABLE.write_text("\n".join(text) + "\n")


def main():
    """Compiles the chosen rows that are missing, and writes the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="*", default=list(CASES))
    parser.add_argument("--modes", nargs="*", default=["none", "blocks"])
    chosen = parser.parse_args()
    if "full, synchronous" in chosen.modes:
        os.environ["XLA_FLAGS"] = (
            f"{os.environ.get('XLA_FLAGS', '')} "
            f"--xla_gpu_disable_async_collectives={SYNCHRONOUS}"
        )
        if len(chosen.modes) > 1:
            parser.error("'full, synchronous' needs a run of its own")
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for name in chosen.models:
        for mode in chosen.modes:
            if f"{name}/{mode}" not in results:
                results[f"{name}/{mode}"] = {
                    "temporaries": measure(name, mode),
                    "date": datetime.date.today().isoformat(),
                }
                RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    write_table(results)


if __name__ == "__main__":
    main()
