"""Profiles a train step of Keras on torch beside one of torch, by operation.

One process, one thread, no distribution: what Keras alone costs. Both train
the decoder of `decoder.py` from the same weights, in turns. The times are those
that torch's profiler gives to each operation itself, on the CPU.

    python benchmarks/keras_over_torch.py --hidden 512
"""

import argparse
import collections
import os

os.environ["KERAS_BACKEND"] = "torch"
os.environ["OMP_NUM_THREADS"] = "1"

import decoder
import native_torch
import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch.profiler import ProfilerActivity
from torch.profiler import profile

SHOWN = 16
# The events that are no operations, such as nodes of autograd.
OPERATIONS = "aten::"


def parse_options():
    """Returns the options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--hidden", type=int, default=512, help="a multiple of 32")
    add("--layers", type=int, default=2)
    add("--steps", type=int, default=10, help="train steps in a turn")
    add("--rounds", type=int, default=6, help="turns of each")
    options = parser.parse_args()
    options.jit = False
    return options


def profiled(train, steps):
    """Returns a dict of each operation to its milliseconds and calls a step."""
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        train()
    return {
        event.key.removeprefix(OPERATIONS): (
            event.self_cpu_time_total / 1000 / steps,
            event.count / steps,
        )
        for event in profiler.key_averages()
        if event.key.startswith(OPERATIONS)
    }


def main():
    """Prints a table of the operations that differ most."""
    options = parse_options()
    x, y = decoder.make_data(options)
    model = decoder.build_model(options)
    native = native_torch.Decoder(options)
    native.copy_weights(model.get_weights())
    optimizer = native_torch.make_optimizer(native)
    loss = native_torch.loss_of(native, options)
    tokens, targets = torch.from_numpy(x), torch.from_numpy(y).long()
    sides = {
        "Keras": lambda: decoder.train_epoch(model, x, y),
        "torch": lambda: native_torch.train_epoch(
            loss, optimizer, tokens, targets, "cpu"
        ),
    }
    found = {name: collections.defaultdict(list) for name in sides}
    losses = [train() for train in sides.values()]
    np.testing.assert_allclose(losses, losses[0], rtol=1e-3)
    for _ in range(options.rounds):
        for name, train in sides.items():
            for key, pair in profiled(train, options.steps).items():
                found[name][key].append(pair)
    medians = {
        name: {key: np.median(pairs, axis=0) for key, pairs in of.items()}
        for name, of in found.items()
    }
    nothing = np.zeros(2)
    rows = {
        key: [medians[name].get(key, nothing) for name in sides]
        for key in set().union(*medians.values())
    }
    rows["all"] = np.sum(list(rows.values()), axis=0)
    table = Table("operation", "Keras ms", "calls", "torch ms", "calls")
    order = sorted(rows, key=lambda key: rows[key][1][0] - rows[key][0][0])
    for key in order[: SHOWN + 1]:
        cells = [f"{n:.2f}" for pair in rows[key] for n in pair]
        table.add_row(key, *cells)
    Console(width=80).print(table)


main()
