"""Compares the step time of this tree with that of another revision, in turns.

Each revision runs its own `step_time.py`, in a process of its own; a run of one
follows a run of the other. The times are those of the side `keras_tp`.

    python benchmarks/before_after.py --before 3c417af --backend torch
"""

import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile

import numpy as np
from intervals import ratio_interval

ROOT = pathlib.Path(__file__).resolve().parent.parent


def unpack(revision, folder):
    """Writes the files of a revision to a folder."""
    command = ["git", "archive", revision]
    files = subprocess.run(command, cwd=ROOT, capture_output=True, check=True)
    folder.mkdir()
    subprocess.run(["tar", "x"], cwd=folder, input=files.stdout, check=True)


def seconds_for_a_step(tree, options, result):
    """Runs the benchmark of a tree; returns the median of `keras_tp`."""
    command = [sys.executable, tree / "benchmarks" / "step_time.py"]
    command += ["--backend", options.backend, "--json", result]
    for name in ("steps", "rounds"):
        command += [f"--{name}", str(getattr(options, name))]
    subprocess.run(
        command,
        cwd=tree,
        env={**os.environ, "PYTHONPATH": str(tree)},
        stdout=subprocess.DEVNULL,
        check=True,
    )
    times = json.loads(result.read_text())["seconds"]["keras_tp"]
    return float(np.median(times))


def main():
    """Runs both revisions in turns and prints the ratio of their times."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--before", required=True, metavar="REVISION")
    add("--backend", choices=("jax", "tensorflow", "torch"), default="jax")
    add("--runs", type=int, default=8, help="runs of each revision")
    add("--rounds", type=int, default=4, help="turns in a run")
    add("--steps", type=int, default=20, help="train steps in a turn")
    options = parser.parse_args()
    before, after = [], []
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        unpack(options.before, folder / "before")
        unpack("HEAD", folder / "after")
        for _ in range(options.runs):
            for name, times in (("before", before), ("after", after)):
                times.append(
                    seconds_for_a_step(
                        folder / name, options, folder / f"{name}.json"
                    )
                )
    low, high = ratio_interval(after, before)
    print(
        f"{options.backend}: {1000 * np.median(before):.2f} ms at "
        f"{options.before}, {1000 * np.median(after):.2f} ms now; ratio of "
        f"medians {np.median(after) / np.median(before):.3f}, 95 % interval "
        f"{low:.3f} to {high:.3f}, {options.runs} runs of each"
    )


if __name__ == "__main__":
    main()
