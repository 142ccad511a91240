"""Times a train step of keras_tp against one of plain Keras, in turns.

Both train the same transformer from the same initial weights with the same
layouts, on virtual devices of one process: one under
`keras_tp.distribution.ModelParallel` with the hooks installed, the other under
`keras.distribution.ModelParallel` with the hooks uninstalled. A turn is one
epoch of `fit`; the turns alternate, so that a slow spell of the machine meets
both. The first turn of each, which compiles, is not counted.

    python benchmarks/step_time.py --devices 4
"""

import argparse
import json
import os
import pathlib
import platform
import sys
import time

HEAD_SIZE = 32
VOCABULARY = 256
SEQUENCE_LENGTH = 64
BATCH_SIZE = 8


def parse_options():
    """Returns the options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--backend", choices=["jax"], default="jax")
    add("--devices", type=int, default=4)
    add("--hidden", type=int, default=256, help="a multiple of 32 x devices")
    add("--layers", type=int, default=2)
    add("--steps", type=int, default=20, help="train steps in a turn")
    add("--rounds", type=int, default=20, help="turns of each")
    add("--json", metavar="FILE", help="where to write all times")
    add("--launched", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    for name in ("devices", "hidden", "layers", "steps", "rounds"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} must be at least 1")
    if options.hidden % (HEAD_SIZE * options.devices):
        parser.error(
            f"--hidden must be a multiple of {HEAD_SIZE} x --devices: each "
            "device gets whole heads"
        )
    return options


OPTIONS = parse_options()
os.environ["KERAS_BACKEND"] = OPTIONS.backend
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

from keras_tp import launch

if not OPTIONS.launched:
    # The devices have to exist before the backend starts.
    count = str(OPTIONS.devices)
    arguments = [*sys.argv[1:], "--launched"]
    launch.main(["--devices", count, os.path.abspath(__file__), *arguments])
    sys.exit()

import keras
import numpy as np
from keras import layers
from rich.console import Console
from rich.table import Table

import keras_tp

LAYOUTS = {
    ".*attention/(query|key|value)/kernel": (None, "model", None),
    ".*attention/(query|key|value)/bias": ("model", None),
    ".*attention_output/kernel": ("model", None, None),
    ".*up/kernel": (None, "model"),
    ".*up/bias": ("model",),
    ".*down/kernel": ("model", None),
    ".*tokens/embeddings": ("model", None),
    ".*logits/kernel": (None, "model"),
    ".*logits/bias": ("model",),
}


def distribution_of(library, options):
    """Returns the distribution, made of one library's classes.

    Args:
        library: Module, `keras.distribution` or `keras_tp.distribution`.
        options: Namespace of `parse_options`.
    """
    mesh = library.DeviceMesh(
        (1, options.devices),
        ["batch", "model"],
        library.list_devices()[: options.devices],
    )
    layout_map = library.LayoutMap(mesh)
    for pattern, axes in LAYOUTS.items():
        layout_map[pattern] = library.TensorLayout(axes, mesh)
    return library.ModelParallel(layout_map=layout_map, batch_dim_name="batch")


def build_model(options):
    """Returns a compiled transformer decoder."""
    keras.utils.set_random_seed(0)
    inputs = keras.Input((SEQUENCE_LENGTH,), dtype="int32")
    x = layers.Embedding(VOCABULARY, options.hidden, name="tokens")(inputs)
    for i in range(options.layers):
        attention = layers.MultiHeadAttention(
            options.hidden // HEAD_SIZE, HEAD_SIZE, name=f"{i}_attention"
        )
        y = layers.LayerNormalization()(x)
        x = x + attention(y, y, use_causal_mask=True)
        y = layers.LayerNormalization()(x)
        y = layers.Dense(4 * options.hidden, "gelu", name=f"{i}_up")(y)
        x = x + layers.Dense(options.hidden, name=f"{i}_down")(y)
    outputs = layers.Dense(VOCABULARY, name="logits")(x)
    model = keras.Model(inputs, outputs)
    model.compile(
        keras.optimizers.Adam(1e-3),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    return model


def take_turn(side, x, y):
    """Trains one epoch.

    Args:
        side: Dict of one side of the comparison.
        x: Array of inputs.
        y: Array of targets.

    Returns:
        Seconds for one step, and the loss.
    """
    side["enter"]()
    start = time.perf_counter()
    history = side["model"].fit(
        x, y, batch_size=BATCH_SIZE, shuffle=False, verbose=0
    )
    seconds = (time.perf_counter() - start) / (len(x) // BATCH_SIZE)
    return seconds, history.history["loss"][0]


def ratio_interval(numerators, denominators, resamples=10000):
    """Returns a 95 % bootstrap interval of the ratio of two medians.

    Rounds are drawn again with replacement, both turns of a round together:
    they met the same machine.
    """
    numerators, denominators = np.array(numerators), np.array(denominators)
    rng = np.random.default_rng(0)
    drawn = rng.integers(len(numerators), size=(resamples, len(numerators)))
    ratios = np.median(numerators[drawn], axis=1) / np.median(
        denominators[drawn], axis=1
    )
    return [float(bound) for bound in np.percentile(ratios, [2.5, 97.5])]


def main(options):
    """Runs the comparison and prints it.

    Args:
        options: Namespace of `parse_options`.
    """
    own = distribution_of(keras_tp.distribution, options)
    plain = distribution_of(keras.distribution, options)

    def enter_own():
        # Installs the hooks too.
        keras_tp.distribution.set_distribution(own)

    def enter_plain():
        keras_tp.uninstall()
        keras.distribution.set_distribution(plain)

    sides = {"keras_tp": {"enter": enter_own}, "keras": {"enter": enter_plain}}
    for side in sides.values():
        side["enter"]()
        side["model"] = build_model(options)
        side["seconds"] = []
    for a, b in zip(*(s["model"].get_weights() for s in sides.values())):
        np.testing.assert_array_equal(a, b)

    rng = np.random.default_rng(0)
    shape = (options.steps * BATCH_SIZE, SEQUENCE_LENGTH)
    x = rng.integers(VOCABULARY, size=shape).astype("int32")
    y = np.roll(x, -1, axis=1)
    for turn in range(options.rounds + 1):
        losses = []
        for side in sides.values():
            seconds, loss = take_turn(side, x, y)
            losses.append(loss)
            if turn:
                side["seconds"].append(seconds)
        # The same work, or the times mean nothing.
        np.testing.assert_allclose(losses[0], losses[1], rtol=1e-3)

    times = {name: side["seconds"] for name, side in sides.items()}
    medians = {name: float(np.median(t)) for name, t in times.items()}
    ratio = medians["keras_tp"] / medians["keras"]
    low, high = ratio_interval(times["keras_tp"], times["keras"])
    parameters = sides["keras"]["model"].count_params()
    table = Table(
        title=(
            f"Train step, {options.backend}, {options.devices} devices, "
            f"{options.layers} layers of {options.hidden} "
            f"({parameters:,} parameters), {options.rounds} turns of "
            f"{options.steps} steps"
        )
    )
    table.add_column("")
    for heading in ("median ms", "fastest ms", "slowest ms"):
        table.add_column(heading, justify="right")
    for name, values in times.items():
        row = (medians[name], min(values), max(values))
        table.add_row(name, *(f"{1000 * value:.2f}" for value in row))
    Console(width=100).print(table)
    print(
        f"ratio of medians: {ratio:.3f}, 95 % interval {low:.3f} to {high:.3f}"
    )
    if options.json:
        result = {
            "options": {k: v for k, v in vars(options).items() if k != "json"},
            "keras": keras.__version__,
            "keras_tp": keras_tp.__version__,
            "machine": f"{platform.machine()}, {os.cpu_count()} cores",
            "seconds": times,
            "medians": medians,
            "ratio": ratio,
            "interval": [low, high],
        }
        pathlib.Path(options.json).write_text(json.dumps(result, indent=2))


main(OPTIONS)
