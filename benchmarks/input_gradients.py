"""Times a tensor-parallel step of torch whose sums of gradients overlap.

`keras_tp.backend.torch.overlap` adds up the gradient of a column-parallel
layer's input while the gradient of its kernel is computed; the other side adds
it up afterwards. The same model takes turns with both.

With `--milliseconds` each sum takes at least that long, as between machines: a
process sleeps until then, when it needs the result. That needs no processor,
so it shows how much of the time is hidden.

    python benchmarks/input_gradients.py --hidden 512
    python benchmarks/input_gradients.py --hidden 512 --milliseconds 5
"""

import argparse
import os
import time

import relaunch

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--devices", type=int, default=2)
parser.add_argument("--hidden", type=int, default=512)
parser.add_argument("--layers", type=int, default=2)
parser.add_argument("--milliseconds", type=float, default=0)
parser.add_argument("--steps", type=int, default=5, help="steps of a turn")
parser.add_argument("--rounds", type=int, default=40, help="turns of each")
relaunch.add_argument(parser)
OPTIONS = parser.parse_args()
os.environ["KERAS_BACKEND"] = "torch"
os.environ["OMP_NUM_THREADS"] = "1"

relaunch.in_processes(OPTIONS)

import decoder
import numpy as np
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from intervals import ratio_interval
from torch.distributed.tensor import DTensor

import keras_tp
from keras_tp.backend.torch import overlap
from keras_tp.backend.torch import placement


def settle_afterwards(tensor):
    """Replaces `overlap.settle`: sums wait for the gradients of kernels."""
    if not isinstance(tensor, DTensor):
        return tensor
    tensor = placement.settled(tensor)
    if tensor.requires_grad and not tensor.is_leaf:
        tensor.register_hook(placement.settled)
    return tensor


def slow_down(seconds):
    """Has the result of each collective arrive so long after its launch."""
    wrap = functional._wrap_tensor_autograd
    kind = functional.AsyncCollectiveTensor
    wait = kind.wait

    def launched(tensor):
        result = wrap(tensor)
        result.arrival = time.perf_counter() + seconds
        return result

    def wait_longer(self):
        result = wait(self)
        time.sleep(max(0, self.arrival - time.perf_counter()))
        return result

    functional._wrap_tensor_autograd = launched
    kind.wait = kind.trigger_wait = wait_longer


def main():
    """Prints the times of both sides, and the ratio of their medians."""
    OPTIONS.jit = False
    ways = {"overlapped": overlap.settle, "afterwards": settle_afterwards}
    x, y = decoder.make_data(OPTIONS)
    if OPTIONS.milliseconds:
        slow_down(OPTIONS.milliseconds / 1000)
    library = keras_tp.distribution
    with decoder.distribution_of(library, OPTIONS).scope():
        model = decoder.build_model(OPTIONS)
        times = {name: [] for name in ways}
        work = {name: [] for name in ways}
        for index in range(OPTIONS.rounds + 1):
            # Which side begins alternates too.
            for name in list(ways)[:: 1 if index % 2 else -1]:
                overlap.settle = ways[name]
                dist.barrier()
                start, worked = time.perf_counter(), time.process_time()
                decoder.train_epoch(model, x, y)
                seconds = time.perf_counter() - start
                worked = time.process_time() - worked
                if index:
                    times[name].append(seconds / OPTIONS.steps)
                    work[name].append(worked / OPTIONS.steps)
    if dist.get_rank() == 0:
        for what, found in (("", times), (", processor", work)):
            medians = [1000 * np.median(found[name]) for name in ways]
            low, high = ratio_interval(*(found[name] for name in ways))
            print(
                f"overlapped {medians[0]:.2f} ms, afterwards {medians[1]:.2f} "
                f"ms{what}: ratio of medians {medians[0] / medians[1]:.3f}, "
                f"95 % interval {low:.3f} to {high:.3f}"
            )


main()
