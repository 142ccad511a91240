"""A callback that tells how a model is distributed, and what a step takes."""

import sys
import time

import keras
from keras.src.utils import io_utils

from keras_tp import backend
from keras_tp.distribution import model_state
from keras_tp.distribution.report import count_collectives
from keras_tp.distribution.report import describe
from keras_tp.distribution.tensor_layout import axis_sizes
from keras_tp.distribution.tensor_layout import format_bytes


class DistributionMonitor(keras.callbacks.Callback):
    """Tells how a model is distributed, and what a step takes.

    When `fit` begins, process 0 prints the mesh, the share that is split, the
    bytes on each device, and the collectives of a train step. At the end of
    each epoch these are added to its logs, so the progress bar, the history,
    and the callbacks that follow in the list, such as `TensorBoard` and
    `CSVLogger`, show them, as this process has measured them:

    - `step_ms`: milliseconds of a step, the mean of the epoch without its first
      step, during which a program may be compiled.
    - `samples_per_s`, and `tokens_per_s` with a `sequence_length`: if
      `batch_size` is given.
    - `memory_mib`: peak use in MiB of the device of this process that holds
      most; on CPU devices, of the process itself.

    Example:

    ```python
    model.fit(
        x,
        y,
        batch_size=32,
        callbacks=[
            DistributionMonitor(batch_size=32),
            keras.callbacks.CSVLogger("log.csv"),
        ],
    )
    ```

    Args:
        batch_size: Int, the global batch size. Defaults to `None`.
        sequence_length: Int, tokens of a sample. Defaults to `None`.
        batch: Pair `(x, y)`, as `train_on_batch` takes them. The collectives of
            a step on it are counted. Defaults to `None`: those that the plan
            of the model predicts, if it has one and `batch_size` is given.
    """

    # Its times are those of finished steps, in whichever thread it runs.
    async_safe = True

    def __init__(self, batch_size=None, sequence_length=None, batch=None):
        super().__init__()
        for name, value in (
            ("batch_size", batch_size),
            ("sequence_length", sequence_length),
        ):
            if value is not None and (not isinstance(value, int) or value < 1):
                raise ValueError(
                    f"`{name}` must be a positive integer. Received: "
                    f"{name}={value!r}"
                )
        if sequence_length is not None and batch_size is None:
            raise ValueError(
                "`sequence_length` needs `batch_size`, to know the number of "
                f"tokens. Received: sequence_length={sequence_length}, "
                "batch_size=None"
            )
        self.batch_size = batch_size
        self.sequence_length = sequence_length
        self.batch = batch
        self._first = self._last = None

    def on_train_begin(self, logs=None):
        # All processes take part in what is gathered for it.
        io_utils.print_msg("\n".join(self._lines()))

    def on_epoch_begin(self, epoch, logs=None):
        self._first = self._last = None

    def on_train_batch_end(self, batch, logs=None):
        self._last = batch, time.perf_counter()
        self._first = self._first or self._last

    def on_epoch_end(self, epoch, logs=None):
        if logs is None:
            return
        logs["memory_mib"] = _peak_memory() / 2**20
        if self._first == self._last:
            # It was the only step, and may have compiled.
            return
        steps, seconds = (
            last - first for first, last in zip(self._first, self._last)
        )
        logs["step_ms"] = 1000 * seconds / steps
        if self.batch_size:
            samples = self.batch_size * steps / seconds
            logs["samples_per_s"] = samples
            if self.sequence_length:
                logs["tokens_per_s"] = samples * self.sequence_length

    def _lines(self):
        distribution = model_state.distribution_of(self.model)
        report = describe(self.model)
        total = format_bytes(report.total_bytes)
        most = format_bytes(max(report.device_bytes.values(), default=0))
        name = f"{self.model.name!r} on {keras.config.backend()}"
        if distribution is None:
            return [f"{name}: {total} on one device, not distributed"]
        share = report.split_bytes / max(report.total_bytes, 1)
        lib = backend.distribution_lib
        return [
            f"{name}: mesh {axis_sizes(distribution.device_mesh)}, "
            f"{lib.num_processes()} process(es)",
            f"  split: {share:.1%} of {total} (weights, slots, metrics)",
            f"  whole: {_largest(report.replicated)}",
            f"  on each device: {most}, on all together "
            f"{format_bytes(sum(report.device_bytes.values()))}",
            f"  collectives of a step{self._collectives(distribution)}",
        ]

    def _collectives(self, distribution):
        plan = getattr(distribution, "plan", None)
        if self.batch is not None:
            how, found = "counted", count_collectives(self.model, *self.batch)
        elif plan is None or self.batch_size is None:
            return ": pass `batch=(x, y)` to count them"
        elif plan.needs_sequence_length and self.sequence_length is None:
            return ": pass `sequence_length` to predict them"
        else:
            how = "predicted"
            found = plan.collectives(self.batch_size, self.sequence_length)
        parts = [
            f"{count} x {kind.replace('_', '-')} ({format_bytes(size)})"
            for kind, (count, size) in found.items()
            if count
        ]
        return f", {how}: {', '.join(parts) or 'none'}"


def _largest(rows):
    if not rows:
        return "nothing"
    row = max(rows, key=lambda row: row.bytes)
    return (
        f"{len(rows)} variables, the largest is {row.path!r} of "
        f"{format_bytes(row.bytes)} ({row.why})"
    )


def _peak_memory():
    held = backend.distribution_lib.peak_memory()
    if held:
        return max(held.values())
    # Imported late: Windows has no such module.
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
