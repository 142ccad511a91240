"""Compares the plan with other ways to split Llama and Gemma, on JAX.

    python benchmarks/planning.py --devices 4

    plan          what `plan_sharding` says
    KerasHub      the backbone's own `get_layout_map`
    largest axis  the largest dim of each variable that divides
    all column    the last dim of each matrix that divides

The bytes are those of the collectives in the compiled train step, the results
on one device. Times are those of `fit`, in turns; virtual devices share the
cores. Exit status 1 if the plan communicates more than any other.
"""

import argparse
import os
import pathlib
import sys
import time

os.environ["KERAS_BACKEND"] = "jax"
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

from keras_tp import launch

# Llama and Gemma with as many heads of keys as devices: KerasHub's maps split
# them.
HEADS = 8
LENGTH = 64
BATCH_SIZE = 4
VOCABULARY = 1024


def parse_options():
    """Returns the options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--devices", type=int, default=4)
    add("--hidden", type=int, default=256)
    add("--layers", type=int, default=2)
    add("--steps", type=int, default=4, help="train steps in a turn")
    add("--rounds", type=int, default=15, help="turns of each")
    add("--launched", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


OPTIONS = parse_options()
if not OPTIONS.launched:
    # The devices have to exist before the backend starts.
    arguments = [*sys.argv[1:], "--launched"]
    script = str(pathlib.Path(__file__).resolve())
    launch.main(["--devices", str(OPTIONS.devices), script, *arguments])
    sys.exit()

import keras
import keras_hub
import numpy as np
from intervals import ratio_interval
from rich.console import Console
from rich.table import Table

from keras_tp import distribution

CONFIG = {
    "vocabulary_size": VOCABULARY,
    "num_layers": OPTIONS.layers,
    "num_query_heads": HEADS,
    "num_key_value_heads": HEADS,
    "hidden_dim": OPTIONS.hidden,
    "intermediate_dim": 4 * OPTIONS.hidden,
}
MODELS = {
    "Llama": (
        keras_hub.models.LlamaBackbone,
        keras_hub.models.LlamaCausalLM,
        CONFIG,
    ),
    "Gemma": (
        keras_hub.models.GemmaBackbone,
        keras_hub.models.GemmaCausalLM,
        {**CONFIG, "head_dim": OPTIONS.hidden // HEADS},
    ),
}


def build(name):
    """Returns a compiled model, with the same initial weights each time."""
    backbone, task, config = MODELS[name]
    keras.utils.set_random_seed(0)
    whole = task(backbone(**config), preprocessor=None)
    model = keras.Model(whole.input, whole.output, name="whole")
    model.compile(
        keras.optimizers.SGD(0.01),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    return model


def plan(name, mesh):
    """Returns the distribution of the plan."""
    made = distribution.plan_sharding(lambda: build(name), mesh)
    return made.distribution()


def own_map(name, mesh):
    """Returns the distribution of KerasHub's map."""
    layout_map = MODELS[name][0].get_layout_map(mesh)
    return distribution.ModelParallel(layout_map=layout_map)


def by_rule(name, mesh, choose):
    """Splits what has a dim that divides, the one that `choose` returns."""
    layout_map = distribution.LayoutMap(mesh)
    count = mesh.shape[1]
    for variable in build(name).weights:
        shape = tuple(variable.shape)
        dims = [i for i, size in enumerate(shape) if size % count == 0]
        dim = choose(shape, dims)
        if dim is not None:
            axes = ["model" if i == dim else None for i in range(len(shape))]
            layout_map[variable.path] = tuple(axes)
    keras.utils.clear_session()
    return distribution.ModelParallel(layout_map=layout_map)


def largest(shape, dims):
    """Returns the largest of the dims that divide, or `None`."""
    return max(dims, key=lambda i: shape[i], default=None)


def last(shape, dims):
    """Returns the last dim of a matrix if it divides, or `None`."""
    last = len(shape) - 1
    return last if last > 0 and last in dims else None


WAYS = {
    "plan": plan,
    "KerasHub": own_map,
    "largest axis": lambda name, mesh: by_rule(name, mesh, largest),
    "all column": lambda name, mesh: by_rule(name, mesh, last),
}


def make_sides(name, x, y):
    """Returns dicts of each way's model and of its collectives.

    Args:
        name: String, key of `MODELS`.
        x: Inputs of one batch.
        y: Targets of one batch.
    """
    mesh = distribution.DeviceMesh((1, OPTIONS.devices), ["batch", "model"])
    models, counted = {}, {}
    for way, make in WAYS.items():
        keras.utils.clear_session()
        parallel = make(name, mesh)
        keras.utils.clear_session()
        with parallel.scope():
            models[way] = build(name)
        counted[way] = distribution.count_collectives(models[way], x, y)
    return models, counted


def run_turns(models, x, y):
    """Has all models take turns; returns their seconds for one step."""
    times = {way: [] for way in models}
    for index in range(OPTIONS.rounds + 1):
        losses = []
        for way, model in models.items():
            start = time.perf_counter()
            history = model.fit(
                x, y, batch_size=BATCH_SIZE, shuffle=False, verbose=0
            ).history
            seconds = time.perf_counter() - start
            losses.append(history["loss"][0])
            # The first turn compiles.
            if index:
                times[way].append(seconds / OPTIONS.steps)
        # The same work, or the times mean nothing.
        np.testing.assert_allclose(losses, losses[0], rtol=1e-3)
    return times


def compare(name, table):
    """Adds the rows of one model; returns whether the plan is the best."""
    rng = np.random.default_rng(0)
    shape = (OPTIONS.steps * BATCH_SIZE, LENGTH)
    tokens = rng.integers(1, VOCABULARY, shape).astype("int32")
    x = {"token_ids": tokens, "padding_mask": np.ones_like(tokens)}
    y = np.roll(tokens, -1, axis=1)
    first = {key: value[:BATCH_SIZE] for key, value in x.items()}
    models, counted = make_sides(name, first, y[:BATCH_SIZE])
    times = run_turns(models, x, y)
    sent = {
        way: sum(size for _, size in found.values())
        for way, found in counted.items()
    }
    for way, found in counted.items():
        kinds = ", ".join(
            f"{count} {kind}" for kind, (count, _) in found.items() if count
        )
        low, high = ratio_interval(times[way], times["plan"])
        ratio = np.median(times[way]) / np.median(times["plan"])
        table.add_row(
            name,
            way,
            f"{sent[way] / 2**20:.2f}",
            kinds,
            f"{1000 * np.median(times[way]):.0f}",
            f"{ratio:.2f} ({low:.2f} to {high:.2f})",
        )
    return sent["plan"] == min(sent.values())


def main():
    """Prints a table; exits with 1 if the plan is not the best."""
    table = Table(title=f"{OPTIONS.devices} devices")
    for heading in ("model", "way", "MiB", "collectives", "ms", "x plan"):
        table.add_column(heading)
    best = [compare(name, table) for name in MODELS]
    Console(width=120).print(table)
    sys.exit(not all(best))


main()
