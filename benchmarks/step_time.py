"""Times the train step of keras_tp against others of equal work, in turns.

What is compared on a backend, and how a turn is run, stands in
`sides_<backend>.py`, a module with

    make_sides(options)  returns a dict of a side's name to a callable that
                         trains `options.steps` steps and returns seconds for
                         one step, and the loss; every side trains the model
                         of `decoder.py` from the same initial weights
    RATIOS               list of pairs of names whose medians are divided

The turns alternate, so that a slow spell of the machine meets all sides. The
first turn of each, which compiles, is not counted. Processor time is that of
the whole turn in the reporting process, all threads: waiting costs none, so it
tells the work of a side on a machine that others keep busy too.

    python benchmarks/step_time.py --devices 4
    python benchmarks/step_time.py --backend torch --hidden 512
"""

import argparse
import importlib
import json
import os
import pathlib
import platform
import time

import relaunch

BACKENDS = ("jax", "tensorflow", "torch")
# Of `decoder.py`, which cannot be imported before the backend is chosen.
HEAD_SIZE = 32


def parse_options():
    """Returns the options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--backend", choices=BACKENDS, default="jax")
    add("--devices", type=int, help="4 by default; 2 on torch")
    add("--hidden", type=int, default=256, help="a multiple of 32 x devices")
    add("--layers", type=int, default=2)
    add("--steps", type=int, default=20, help="train steps in a turn")
    add("--rounds", type=int, default=20, help="turns of each")
    add("--jit", action="store_true", help="torch: compile the steps")
    add("--json", metavar="FILE", help="where to write all times")
    relaunch.add_argument(parser)
    options = parser.parse_args()
    if options.devices is None:
        options.devices = 2 if options.backend == "torch" else 4
    for name in ("devices", "hidden", "layers", "steps", "rounds"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} must be at least 1")
    if options.jit and options.backend != "torch":
        parser.error("--jit is for torch; the others always compile")
    if options.hidden % (HEAD_SIZE * options.devices):
        parser.error(
            f"--hidden must be a multiple of {HEAD_SIZE} x --devices: each "
            "device gets whole heads"
        )
    return options


OPTIONS = parse_options()
os.environ["KERAS_BACKEND"] = OPTIONS.backend
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
if OPTIONS.backend == "torch":
    # A process is a device of one thread. Read when torch is imported.
    os.environ["OMP_NUM_THREADS"] = "1"

relaunch.in_processes(OPTIONS)

import keras
import numpy as np
from intervals import ratio_interval
from rich.console import Console
from rich.table import Table

import keras_tp

sides_module = importlib.import_module(f"sides_{OPTIONS.backend}")


def run_turns(sides, options):
    """Has all sides take turns.

    Args:
        sides: Dict of a side's name to its callable.
        options: Namespace of `parse_options`.

    Returns:
        Dict of a side's name to the list of its seconds for one step, and a
        dict with those that processors worked for it.
    """
    times = {name: [] for name in sides}
    work = {name: [] for name in sides}
    for index in range(options.rounds + 1):
        losses = []
        for name, turn in sides.items():
            start = time.process_time()
            seconds, loss = turn()
            worked = (time.process_time() - start) / options.steps
            losses.append(loss)
            if index:
                times[name].append(seconds)
                work[name].append(worked)
        # The same work, or the times mean nothing.
        np.testing.assert_allclose(losses, losses[0], rtol=1e-3)
    return times, work


def compare(times):
    """Returns the ratios of medians, with their intervals, by name."""
    ratios = {}
    for a, b in sides_module.RATIOS:
        ratio = float(np.median(times[a]) / np.median(times[b]))
        interval = ratio_interval(times[a], times[b])
        ratios[f"{a} / {b}"] = {"ratio": ratio, "interval": interval}
    return ratios


def report(options, times, work):
    """Prints medians and ratios, and writes them if that was asked for.

    Args:
        options: Namespace of `parse_options`.
        times: Dict of a side's name to its seconds, of `run_turns`.
        work: The same for the seconds of processors.
    """
    print(
        f"Train step, {options.backend}{' compiled' * options.jit}, "
        f"{options.devices} devices, "
        f"{options.layers} layers of {options.hidden}, "
        f"{options.rounds} turns of {options.steps} steps"
    )
    table = Table()
    table.add_column("")
    headings = ("median ms", "fastest ms", "slowest ms", "processor ms")
    for heading in headings:
        table.add_column(heading, justify="right")
    for name, values in times.items():
        row = (np.median(values), min(values), max(values))
        row += (np.median(work[name]),)
        table.add_row(name, *(f"{1000 * value:.2f}" for value in row))
    Console(width=100).print(table)
    result = {"ratios": compare(times), "processor_ratios": compare(work)}
    for kind, what in (("ratios", ""), ("processor_ratios", ", processor")):
        for name, found in result[kind].items():
            low, high = found["interval"]
            print(
                f"{name}{what}: ratio of medians {found['ratio']:.3f}, "
                f"95 % interval {low:.3f} to {high:.3f}"
            )
    if options.json:
        result.update(
            options={k: v for k, v in vars(options).items() if k != "json"},
            keras=keras.__version__,
            keras_tp=keras_tp.__version__,
            machine=f"{platform.machine()}, {os.cpu_count()} cores",
            seconds=times,
            processor_seconds=work,
        )
        pathlib.Path(options.json).write_text(json.dumps(result, indent=2))


measured = run_turns(sides_module.make_sides(OPTIONS), OPTIONS)
# Where every device is a process of its own, the first one reports.
if os.environ.get("RANK", "0") == "0":
    report(OPTIONS, *measured)
