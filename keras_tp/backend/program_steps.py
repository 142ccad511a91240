"""The steps of a compiled program, as backends hand them to reports."""

import collections

COMPUTE = "compute"
DONE = "done"


class Step(
    collections.namedtuple(
        "Step",
        [
            "name",
            "kind",
            "times",
            "flops",
            "bytes",
            "tensors",
            "devices",
            "is_started",
            "kernel",
        ],
        defaults=[1, {}, 0, 0, (), False, ""],
    )
):
    """One step of a program on one device, in the order of the program.

    Args:
        name: String. A step of kind `"done"` has the name of its start.
        kind: String. `"compute"`, or a collective such as `"all_reduce"`, or
            `"done"`, where the program waits for a collective that it started
            before.
        times: Int, how often a loop runs the step. Defaults to 1.
        flops: Dict of dtype to the FLOPs of matmuls and convolutions, each
            time. Defaults to none.
        bytes: Int. What a compute step reads and writes each time, or the size
            of the results of a collective. Defaults to 0.
        tensors: Int, number of tensors that a collective combines.
        devices: Tuple of ints, the devices of one group of a collective.
        is_started: Boolean, whether the program goes on while a collective
            runs, until its step of kind `"done"`. Defaults to `False`.
        kernel: String, the library or kernel that computes attention. Defaults
            to `""` for other steps.
    """
