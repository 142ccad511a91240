"""Times a data-parallel step of torch with gradients summed in buckets.

Each process has its rows of a batch, and the gradients of all variables are
added up over the processes. `keras_tp.backend.torch.gradient_sums` launches
many sums together, and during the backward pass; the other side launches and
awaits one after the other. The same model takes turns with both.

    python benchmarks/data_parallel.py --devices 2
"""

import argparse
import os
import time

import relaunch

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--devices", type=int, default=2)
parser.add_argument("--hidden", type=int, default=64)
parser.add_argument("--layers", type=int, default=8)
parser.add_argument("--steps", type=int, default=10, help="steps of a turn")
parser.add_argument("--rounds", type=int, default=20, help="turns of each")
relaunch.add_argument(parser)
OPTIONS = parser.parse_args()
os.environ["KERAS_BACKEND"] = "torch"
os.environ["OMP_NUM_THREADS"] = "1"

relaunch.in_processes(OPTIONS)

import decoder
import numpy as np
import torch.distributed as dist
from intervals import ratio_interval

import keras_tp
from keras_tp.backend.torch import gradient_sums


def main():
    """Prints the times of both sides, and the ratio of their medians."""
    OPTIONS.jit = False
    waits = gradient_sums.waits
    x, y = decoder.make_data(OPTIONS)
    with keras_tp.distribution.DataParallel().scope():
        model = decoder.build_model(OPTIONS)
        times = {"buckets": [], "one by one": []}
        for index in range(OPTIONS.rounds + 1):
            for name, found in times.items():
                in_buckets = name == "buckets"
                gradient_sums.waits = waits if in_buckets else lambda *_: False
                dist.barrier()
                start = time.perf_counter()
                decoder.train_epoch(model, x, y)
                if index:
                    seconds = time.perf_counter() - start
                    found.append(seconds / OPTIONS.steps)
    if dist.get_rank() == 0:
        for name, found in times.items():
            print(f"{name}: median {1000 * np.median(found):.2f} ms")
        ratio = np.median(times["buckets"]) / np.median(times["one by one"])
        low, high = ratio_interval(*times.values())
        print(
            f"{len(model.trainable_variables)} variables, ratio of medians "
            f"{ratio:.3f}, 95 % interval {low:.3f} to {high:.3f}"
        )


main()
