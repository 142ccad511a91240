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

It ends with a summary, and writes the plan of the model as a page and the
table of what each device holds to the folder `--output`.
"""

import argparse
import json
import math
import os
import pathlib
import sys
import time

# Layers, hidden size, heads, feed-forward size, and a peak learning rate that
# suits them. That of `mini` is so low that rounding stays rounding for 120
# steps: the losses on any mesh are those of one device. Over a longer run, or
# at a higher rate, training itself amplifies the last bit, as it does between
# any two machines. `opt-125m` is OPT-125M with bytes for tokens: its blocks and
# its learning rate (https://arxiv.org/abs/2205.01068, table 1).
SIZES = {
    "tiny": (2, 64, 8, 256, 3e-3),
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
    numbers = {
        "--devices": (int, None, "how many; those of the mesh, or 4"),
        "--steps": (int, 1500, "batches to train on (%(default)s)"),
        "--batch-size": (int, 8, "sequences in a batch (%(default)s)"),
        "--sequence-length": (int, 64, "bytes in each (%(default)s)"),
        "--dropout": (float, 0.0, "rate in every block (%(default)s)"),
        "--seed": (int, 0, "of weights, data, dropout (%(default)s)"),
    }
    for name, (kind, default, text) in numbers.items():
        add(name, type=kind, default=default, help=text)
    add("--processes", help="how many share the devices (one; on torch all)")
    add("--mesh", help="batch x model, such as 2x2; by default 1 x devices")
    backends = ["jax", "tensorflow", "torch"]
    add("--backend", choices=backends, default="jax", help="(%(default)s)")
    add("--size", choices=SIZES, default="tiny", help="(%(default)s)")
    add(
        "--output",
        metavar="FOLDER",
        default="build/train_lm",
        help="for the page of the plan and the table (%(default)s)",
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
import train_lm_report
import train_lm_text
from keras import ops

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
    length = options.sequence_length
    backbone = keras_hub.models.OPTBackbone(
        vocabulary_size=VOCABULARY,
        num_layers=layers,
        num_heads=heads,
        hidden_dim=hidden,
        intermediate_dim=feed_forward,
        dropout=options.dropout,
        max_sequence_length=length,
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
        sampler=train_lm_text.GumbelSampler(
            length, 8, VOCABULARY, options.seed, temperature=0.5
        ),
    )
    return model


def main(options):
    """Trains, evaluates and reports.

    Args:
        options: Namespace of `parse_options`.
    """
    keras.utils.set_random_seed(options.seed)
    mesh = keras_tp.distribution.DeviceMesh(
        options.mesh,
        ["batch", "model"],
        keras_tp.distribution.list_devices()[: options.devices],
    )
    if options.devices > 1:
        keras_tp.distribution.set_distribution(
            keras_tp.distribution.ModelParallel(
                layout_map=opt_layout_map(mesh), batch_dim_name="batch"
            )
        )
    model = build_model(options)

    train, held_out = train_lm_text.read_text()
    length, batch_size = options.sequence_length, options.batch_size
    # Drawn once, in the order of training: the same at any device count.
    starts = np.random.default_rng(options.seed).integers(
        0, len(train) - length, size=options.steps * batch_size
    )
    x, y = train_lm_text.inputs_and_targets(train, starts, length)
    # Sequences spread evenly over all held-out files.
    val_starts = np.linspace(0, len(held_out) - length - 1, 512).astype(int)
    val_x, val_y = train_lm_text.inputs_and_targets(
        held_out, val_starts, length
    )

    title = (
        f"OPT {options.size}: {model.count_params():,} parameters, on "
        f"{options.devices} device(s), mesh {options.mesh} (batch, model)"
    )
    if FIRST_PROCESS:
        print(title)
    log = LossLog()
    # Bars that can be redrawn, or a line for each epoch in a file.
    verbose = 1 if sys.stdout.isatty() else 2
    epochs = 10 if options.steps >= 100 and options.steps % 10 == 0 else 1
    started = time.time()
    model.fit(
        x,
        y,
        batch_size=batch_size,
        epochs=epochs,
        steps_per_epoch=options.steps // epochs,
        shuffle=False,
        callbacks=[log],
        verbose=verbose,
    )
    seconds = time.time() - started
    val_loss = model.evaluate(
        val_x, val_y, batch_size=32, verbose=verbose, return_dict=True
    )["loss"]
    first = {name: value[:batch_size] for name, value in x.items()}
    result = {
        "backend": options.backend,
        "devices": options.devices,
        "mesh": options.mesh,
        "size": options.size,
        "seed": options.seed,
        "seconds": seconds,
        "losses": log.losses,
        "val_loss": val_loss,
        "unigram_entropy": train_lm_text.unigram_entropy(val_y),
        # Each process takes part in these three, and in `describe`.
        "collectives": keras_tp.distribution.count_collectives(
            model, first, y[:batch_size]
        ),
        "samples": [list(text) for text in train_lm_text.sample(model, length)],
    }
    report = keras_tp.distribution.describe(model)
    if not FIRST_PROCESS:
        return
    plan = keras_tp.distribution.plan_sharding(model, mesh)
    predicted = train_lm_report.predicted_all_reduces(plan, batch_size, length)
    result["predicted_all_reduces"] = predicted
    folder = pathlib.Path(options.output)
    folder.mkdir(parents=True, exist_ok=True)
    plan.to_html(folder / "plan.html", batch_size, length)
    (folder / "sharding.txt").write_text(str(report))
    print()
    print(title)
    print(train_lm_report.summary(result, report, folder))
    if options.log:
        pathlib.Path(options.log).write_text(json.dumps(result, indent=2))


main(OPTIONS)
