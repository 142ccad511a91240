"""torch: Keras and torch itself, both split over processes and on one.

    keras_tp            Keras's model under `keras_tp.distribution`
    parallelize_module  torch's model, split by torch itself (column and row
                        in the same places)
    keras               Keras's model, not split, hooks uninstalled
    torch               torch's model, not split

So `keras_tp / parallelize_module` is what keras_tp and Keras together cost
over torch, and `keras / torch` is what Keras alone costs.

Every process has one thread. A side that is not split runs in process 0 alone,
while the others wait for its result, blocked in a receive of gloo; that takes
0.4 % of a core, so the single process has memory bandwidth and clock to
itself, as it would without us. This favours the sides that are not split where
they are compared with split ones, not where they are compared with each other.
A split side starts when all processes are there, and is timed on process 0.
The model of torch runs torch's own defaults: an eager loop, no compilation,
Adam as `torch.optim` chooses to run it. With `--jit` Keras's models have
`jit_compile=True`, and the model of torch and its loss go through
`torch.compile`. On a machine with a CUDA device there is one process.
"""

import datetime
import time

import decoder
import native_torch
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

import keras_tp

RATIOS = [
    ("keras_tp", "parallelize_module"),
    ("keras", "torch"),
    ("keras_tp", "keras"),
    ("parallelize_module", "torch"),
]
# For a turn of a single process, in which the others wait.
PATIENCE = datetime.timedelta(hours=1)


def make_sides(options):
    """Returns a dict of a side's name to the callable that takes its turn."""
    own = decoder.distribution_of(keras_tp.distribution, options)
    x, y = decoder.make_data(options)
    tokens, targets = torch.from_numpy(x), torch.from_numpy(y).long()
    device = "cuda" if torch.cuda.is_available() else "cpu"

    def enter_own():
        # Installs the hooks too.
        keras_tp.distribution.set_distribution(own)

    def leave():
        keras_tp.distribution.set_distribution(None)
        keras_tp.uninstall()

    enter_own()
    split_model = decoder.build_model(options)
    group = dist.new_group(timeout=PATIENCE)
    leave()
    model = decoder.build_model(options)
    natives = []
    for split in (True, False):
        native = native_torch.Decoder(options).to(device)
        native.copy_weights(model.get_weights())
        if split:
            mesh = init_device_mesh(device, (options.devices,))
            plan = native_torch.parallelize_plan(options)
            parallelize_module(native, mesh, plan)
        optimizer = native_torch.make_optimizer(native)
        natives.append((native_torch.loss_of(native, options), optimizer))

    def in_all_processes(enter, train):
        def turn():
            enter()
            dist.barrier(group)
            start = time.perf_counter()
            loss = train()
            return (time.perf_counter() - start) / options.steps, loss

        return turn

    def in_the_first_process(enter, train):
        def turn():
            enter()
            result = [None]
            if dist.get_rank() == 0:
                start = time.perf_counter()
                loss = train()
                seconds = (time.perf_counter() - start) / options.steps
                result = [(seconds, loss)]
            dist.broadcast_object_list(result, src=0, group=group)
            return result[0]

        return turn

    def train_native(index):
        return native_torch.train_epoch(
            *natives[index], tokens, targets, device
        )

    return {
        "keras_tp": in_all_processes(
            enter_own, lambda: decoder.train_epoch(split_model, x, y)
        ),
        "parallelize_module": in_all_processes(leave, lambda: train_native(0)),
        "keras": in_the_first_process(
            leave, lambda: decoder.train_epoch(model, x, y)
        ),
        "torch": in_the_first_process(leave, lambda: train_native(1)),
    }
