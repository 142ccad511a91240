"""Trains an OPT language model on Python's own source code, sharded.

The architecture is KerasHub's OPT; the text is the standard library of the
Python that runs this, read as bytes. Each device holds its part of the
attention heads, of the feed-forward layers and of the vocabulary (the layouts
of Megatron-LM, https://arxiv.org/abs/1909.08053, section 3). The script starts
itself on the devices it is asked for:

    python examples/train_lm.py --devices 4
    python examples/train_lm.py --mesh 2x2
    python examples/train_lm.py --backend torch --devices 2
    python examples/train_lm.py --devices 4 --processes 2
    python examples/train_lm.py --devices 1

The last one is plain Keras, without any distribution, and gives the same
losses: to rounding (1e-5) over the first 30 to 40 steps, and then as far apart
as training drives a rounding error, with a distribution or without one.
"""

import argparse
import json
import math
import os
import pathlib
import sys
import sysconfig
import time

# Layers, hidden size, heads, feed-forward size, and a peak learning rate that
# suits them. That of `mini`, the default, and the default number of steps are
# such that rounding stays rounding: the losses on any mesh are those of one
# device all along. Over a longer run, or at a higher rate, training itself
# amplifies the last bit, as it does between any two machines. `opt-125m` is
# OPT-125M with bytes for tokens: its blocks and its learning rate
# (https://arxiv.org/abs/2205.01068, table 1).
SIZES = {
    "tiny": (2, 64, 4, 256, 1e-3),
    "mini": (2, 128, 8, 512, 5e-4),
    "small": (4, 256, 8, 1024, 1e-3),
    "medium": (8, 512, 8, 2048, 6e-4),
    "opt-125m": (12, 768, 12, 3072, 6e-4),
}
VOCABULARY = 256
WARM_UP_STEPS = 30


def parse_options():
    """Returns the options of the command line, with the mesh worked out."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add(
        "--devices",
        type=int,
        help="how many; by default those of the mesh, or 4",
    )
    add("--processes", help="how many share the devices (one; on torch all)")
    add("--mesh", help="batch x model, such as 2x2; by default 1 x devices")
    add(
        "--backend",
        choices=["jax", "tensorflow", "torch"],
        default="jax",
        help="Keras's backend (%(default)s)",
    )
    add(
        "--size",
        choices=SIZES,
        default="mini",
        help="of the model (%(default)s)",
    )
    add(
        "--steps",
        type=int,
        default=120,
        help="batches to train on (%(default)s)",
    )
    add(
        "--batch-size",
        type=int,
        default=32,
        help="sequences in a batch (%(default)s)",
    )
    add(
        "--sequence-length",
        type=int,
        default=64,
        help="bytes in each (%(default)s)",
    )
    add(
        "--dropout",
        type=float,
        default=0.0,
        help="rate in every block (%(default)s)",
    )
    add(
        "--seed",
        type=int,
        default=0,
        help="of weights, data and dropout (%(default)s)",
    )
    add("--log", metavar="FILE", help="JSON of all losses to write")
    add("--launched", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    try:
        shape = [int(n) for n in (options.mesh or "").split("x") if n]
    except ValueError:
        shape = [0]
    if options.mesh and (len(shape) != 2 or min(shape) < 1):
        parser.error(f"--mesh must be like 2x2, not {options.mesh!r}")
    if options.devices is None:
        options.devices = math.prod(shape) if shape else 4
    options.mesh = tuple(shape or (1, options.devices))
    if math.prod(options.mesh) != options.devices:
        parser.error(
            f"a mesh of {options.mesh[0]}x{options.mesh[1]} does not have "
            f"{options.devices} devices"
        )
    for name in ("devices", "steps", "batch_size", "sequence_length"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1")
    return options


OPTIONS = parse_options()

# Where there are several processes, as on torch, where each device has its own,
# all of them do everything; the first alone prints and writes.
FIRST_PROCESS = "0" == os.environ.get(
    "KERAS_DISTRIBUTION_PROCESS_ID", os.environ.get("RANK", "0")
)

# Keras reads its backend, and TensorFlow (which KerasHub imports for its
# tokenizers) how much to log, when they are imported.
os.environ["KERAS_BACKEND"] = OPTIONS.backend
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

from keras_tp import launch

if OPTIONS.devices > 1 and not OPTIONS.launched:
    # The devices have to exist before the backend starts: this script runs
    # once more, on them.
    command = ["--devices", str(OPTIONS.devices)]
    if OPTIONS.processes:
        command += ["--processes", OPTIONS.processes]
    arguments = [*sys.argv[1:], "--launched"]
    launch.main([*command, os.path.abspath(__file__), *arguments])
    sys.exit()

import keras
import keras_hub
import numpy as np
from keras import ops
from rich.console import Console
from rich.table import Table

import keras_tp


class LastValue(keras.metrics.Metric):
    """The value of the last step, where `Mean` has that of all steps."""

    def __init__(self, name):
        super().__init__(name=name)
        self.last = self.add_variable((), "zeros", name="last")

    def update_state(self, value):
        self.last.assign(ops.stop_gradient(value))

    def result(self):
        return ops.convert_to_tensor(self.last)


class ByteLM(keras_hub.models.OPTCausalLM):
    """OPT that also reports the loss of each single step."""

    def __init__(self, backbone, **kwargs):
        super().__init__(backbone, **kwargs)
        self.step_loss = LastValue(name="step_loss")

    def compute_loss(self, *args, **kwargs):
        loss = super().compute_loss(*args, **kwargs)
        self.step_loss.update_state(loss)
        return loss


class LossLog(keras.callbacks.Callback):
    """Keeps the loss of each train step.

    Attributes:
        losses: List of floats.
    """

    def __init__(self):
        super().__init__()
        self.losses = []

    def on_train_batch_end(self, batch, logs=None):
        self.losses.append(float(logs["step_loss"]))


def read_text():
    """Returns the text to train on and the held-out text.

    Returns:
        Two arrays of bytes. Every tenth file of the standard library is held
        out, in the order of their names.
    """
    folder = pathlib.Path(sysconfig.get_paths()["stdlib"])
    files = [path.read_bytes() for path in sorted(folder.glob("*.py"))]
    held_out = b"".join(files[9::10])
    train = b"".join(f for i, f in enumerate(files) if i % 10 != 9)
    return (np.frombuffer(text, "uint8") for text in (train, held_out))


def inputs_and_targets(text, starts, length):
    """Cuts sequences from a text.

    Args:
        text: Array of bytes.
        starts: Array of ints, where each sequence starts.
        length: Int, bytes in a sequence.

    Returns:
        The inputs of an OPT model, and for each byte the one that follows.
    """
    cut = text[starts[:, None] + np.arange(length + 1)].astype("int32")
    inputs = {
        "token_ids": cut[:, :-1],
        "padding_mask": np.ones_like(cut[:, :-1]),
    }
    return inputs, cut[:, 1:]


def unigram_entropy(targets):
    """Returns the entropy of single bytes in nats.

    No model that ignores the context has a lower loss on these bytes.
    """
    share = np.bincount(targets.ravel()) / targets.size
    share = share[share > 0]
    return float(-(share * np.log(share)).sum())


def opt_layout_map(mesh):
    """Returns the layouts of OPT: two all-reduces forward in each block.

    Args:
        mesh: `DeviceMesh` with an axis `"model"`, whose size divides the
            number of heads.
    """
    layout_map = keras_tp.distribution.LayoutMap(mesh)
    # Column: each device computes the heads and the hidden units it holds.
    # Kernels of query, key and value are (hidden, heads, head size).
    attention = ".*self_attention/(query|key|value)"
    layout_map[f"{attention}/kernel"] = (None, "model", None)
    layout_map[f"{attention}/bias"] = ("model", None)
    layout_map[".*feedforward_intermediate_dense/kernel"] = (None, "model")
    layout_map[".*feedforward_intermediate_dense/bias"] = ("model",)
    # Row: partial sums, which one all-reduce adds up. Their biases are added
    # after it.
    layout_map[".*attention_output/kernel"] = ("model", None, None)
    layout_map[".*attention_output/bias"] = (None,)
    layout_map[".*feedforward_output_dense/kernel"] = ("model", None)
    layout_map[".*feedforward_output_dense/bias"] = (None,)
    # The vocabulary: of the embedding, and as it is tied, of the logits.
    layout_map[".*token_embedding/embeddings"] = ("model", None)
    layout_map[".*position_embedding/embeddings"] = (None, None)
    layout_map[".*layer_norm/(gamma|beta)"] = (None,)
    # Anything that this does not cover is an error.
    layout_map.strict = True
    return layout_map


def build_model(options):
    """Returns the compiled model.

    It is the same on one device and on many: a distribution that is set
    before lays out its variables while they are made.
    """
    layers, hidden, heads, feed_forward, learning_rate = SIZES[options.size]
    backbone = keras_hub.models.OPTBackbone(
        vocabulary_size=VOCABULARY,
        num_layers=layers,
        num_heads=heads,
        hidden_dim=hidden,
        intermediate_dim=feed_forward,
        dropout=options.dropout,
        max_sequence_length=options.sequence_length,
        name="backbone",
    )
    model = ByteLM(backbone, name="byte_lm")
    schedule = keras.optimizers.schedules.CosineDecay(
        0.0,
        max(options.steps - WARM_UP_STEPS, 1),
        warmup_target=learning_rate,
        warmup_steps=WARM_UP_STEPS,
    )
    model.compile(
        optimizer=keras.optimizers.Adam(schedule),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        # KerasHub's default is an accuracy.
        weighted_metrics=[],
        sampler="greedy",
    )
    return model


def sample(model, text):
    """Returns a text with its second half generated by the model.

    Args:
        text: Array of bytes, as many as in a sequence.
    """
    known = np.arange(len(text)) < len(text) // 2
    prompt = {
        "token_ids": text[None].astype("int32"),
        "padding_mask": known[None].astype("int32"),
    }
    generated = model.generate(prompt, stop_token_ids=None)["token_ids"]
    return bytes(np.asarray(generated)[0].astype("uint8"))


def collectives_table(counts):
    """Returns a table of what `count_collectives` counted."""
    table = Table(title="Collectives of one train step")
    table.add_column("collective")
    table.add_column("count", justify="right")
    table.add_column("MiB/device", justify="right")
    for name, (count, size) in counts.items():
        table.add_row(name, str(count), f"{size / 2**20:.3f}")
    return table


def main(options):
    """Trains, evaluates and reports.

    Args:
        options: Namespace of `parse_options`.
    """
    started = time.time()
    keras.utils.set_random_seed(options.seed)
    if options.devices > 1:
        mesh = keras_tp.distribution.DeviceMesh(
            options.mesh,
            ["batch", "model"],
            keras_tp.distribution.list_devices()[: options.devices],
        )
        keras_tp.distribution.set_distribution(
            keras_tp.distribution.ModelParallel(
                layout_map=opt_layout_map(mesh), batch_dim_name="batch"
            )
        )
    model = build_model(options)

    train, held_out = read_text()
    length = options.sequence_length
    # Drawn once, in the order of training: the same at any device count.
    starts = np.random.default_rng(options.seed).integers(
        0, len(train) - length, size=options.steps * options.batch_size
    )
    x, y = inputs_and_targets(train, starts, length)
    # Sequences spread evenly over all held-out files.
    val_starts = np.linspace(0, len(held_out) - length - 1, 512).astype(int)
    val_x, val_y = inputs_and_targets(held_out, val_starts, length)

    if FIRST_PROCESS:
        print(
            f"OPT {options.size}: {model.count_params():,} parameters, on "
            f"{options.devices} device(s), mesh {options.mesh} (batch, model)"
        )
    log = LossLog()
    # Bars that can be redrawn, or a line for each epoch in a file.
    verbose = 1 if sys.stdout.isatty() else 2
    epochs = 10 if options.steps >= 100 and options.steps % 10 == 0 else 1
    model.fit(
        x,
        y,
        batch_size=options.batch_size,
        epochs=epochs,
        steps_per_epoch=options.steps // epochs,
        shuffle=False,
        callbacks=[log],
        verbose=verbose,
    )
    val_loss = model.evaluate(
        val_x,
        val_y,
        batch_size=options.batch_size,
        verbose=verbose,
        return_dict=True,
    )["loss"]
    entropy = unigram_entropy(val_y)
    first = {name: value[: options.batch_size] for name, value in x.items()}
    counts = keras_tp.distribution.count_collectives(
        model, first, y[: options.batch_size]
    )
    report = keras_tp.distribution.describe(model)
    generated = sample(model, held_out[:length])
    if not FIRST_PROCESS:
        return

    print(report)
    Console(width=120).print(collectives_table(counts))
    print(
        f"Validation loss on held-out files: {val_loss:.4f} nats per byte\n"
        f"Unigram entropy of the same bytes: {entropy:.4f} nats per byte\n"
        f"Prompt:    {generated[: length // 2]}\n"
        f"Generated: {generated[length // 2 :]}\n"
        f"Seconds since the devices started: {time.time() - started:.0f}"
    )
    if options.log:
        result = {
            "backend": options.backend,
            "devices": options.devices,
            "mesh": options.mesh,
            "size": options.size,
            "seed": options.seed,
            "losses": log.losses,
            "val_loss": val_loss,
            "unigram_entropy": entropy,
            "collectives": counts,
            "sample": list(generated),
        }
        pathlib.Path(options.log).write_text(json.dumps(result, indent=2))


main(OPTIONS)
