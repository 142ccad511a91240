"""Figures of a compiled train step, and their law in the depth of a model."""

import collections

from keras_tp.backend import program_steps


def figures(steps, memory, accelerator):
    """Returns what a compiled step holds, computes and sends, on one device.

    The time is a lower limit, the roofline (Williams, Waterman and Patterson
    2009): each computation takes what its FLOPs or its bytes take, the larger
    one, and each collective what its bytes take on the links. Collectives run
    one after the other, and beside the computations that the program has
    between their start and their end.

    Args:
        steps: List of `Step`.
        memory: Dict of kind to bytes.
        accelerator: `Accelerator`.

    Returns:
        Dict of numbers and of dicts of numbers: `"memory"` and
        `"collectives"`, `"flops"` by dtype, `"bytes"` read and written,
        `"attention"` by kernel, and `"seconds"`.
    """
    collectives, flops, kernels = {}, collections.Counter(), {}
    seconds = dict.fromkeys(
        ("compute", "matmul", "communication", "exposed", "step"), 0.0
    )
    moved, clock, link_free, ends = 0, 0.0, 0.0, {}
    for step in steps:
        if step.kind == program_steps.DONE:
            row, sent, end, computed = ends.pop(step.name)
            waited = max(end - clock, 0.0)
            row["hidden_seconds"] += max(sent - waited, 0.0)
            if seconds["compute"] > computed:
                row["beside"] += step.times
            clock += waited
        elif step.kind == program_steps.COMPUTE:
            taken, matmul = _compute_seconds(step, accelerator)
            clock += taken
            seconds["compute"] += taken
            seconds["matmul"] += matmul
            moved += step.bytes * step.times
            for dtype, count in step.flops.items():
                flops[dtype] += count * step.times
            if step.kernel:
                kernels[step.kernel] = kernels.get(step.kernel, 0) + step.times
        else:
            row = collectives.setdefault(step.kind, _no_collectives())
            sent = step.times * accelerator.send_seconds(
                step.kind, step.bytes, step.devices
            )
            row["count"] += step.tensors * step.times
            row["operations"] += step.times
            row["bytes"] += step.bytes * step.times
            row["seconds"] += sent
            seconds["communication"] += sent
            link_free = max(clock, link_free) + sent
            if step.is_started:
                ends[step.name] = row, sent, link_free, seconds["compute"]
            else:
                clock = link_free
    seconds["step"] = clock
    seconds["exposed"] = clock - seconds["compute"]
    return {
        "memory": dict(memory),
        "collectives": collectives,
        "flops": dict(flops),
        "bytes": moved,
        "attention": kernels,
        "seconds": seconds,
    }


def _compute_seconds(step, accelerator):
    matmul = sum(
        count / accelerator.peak_flops(dtype)
        for dtype, count in step.flops.items()
    )
    return (
        step.times * max(matmul, step.bytes / accelerator.memory_speed),
        step.times * matmul,
    )


def _no_collectives():
    names = ("count", "operations", "beside", "bytes", "seconds")
    return {**dict.fromkeys(names, 0), "hidden_seconds": 0.0}


def at_depth(depth, first, second):
    """Returns figures for a number of layers, from those for two others.

    Layers are alike, so each figure is linear in their number.

    Args:
        depth: Int.
        first: Pair of a number of layers and its figures.
        second: Another pair.
    """
    (low, left), (high, right) = first, second
    if isinstance(left, dict) or isinstance(right, dict):
        names = {**(left or {}), **(right or {})}
        return {
            name: at_depth(
                depth,
                (low, (left or {}).get(name)),
                (high, (right or {}).get(name)),
            )
            for name in names
        }
    left, right = left or 0, right or 0
    value = left + (right - left) * (depth - low) / (high - low)
    whole = isinstance(left, int) and isinstance(right, int)
    return round(value) if whole else value
