"""The law of `scaling.py`: bytes, FLOPs and links give the time of a step.

A step takes the seconds of its FLOPs at a share of the peak, and the seconds
of its collectives in rings without latency. The devices of the model axis are
neighbours. Two neighbours of the data axis have a whole model axis between.
"""

# Of the FLOPs of a step; the forward pass has the other third.
BACKWARD = 2 / 3


def bytes_sent(accelerator, collectives, count):
    """Returns the bytes that each device sends in rings.

    Args:
        accelerator: `Accelerator`; its links do not matter.
        collectives: Dict of kind to `(number, bytes of the results)`.
        count: Int, the number of devices in a group.
    """
    # At one byte per second, seconds are bytes.
    slow = accelerator._replace(link_speed=1, node_size=count)
    return sum(
        slow.send_seconds(kind, nbytes, range(count))
        for kind, (_, nbytes) in collectives.items()
    )


def train_flops(elements, tokens, layers, width, length):
    """Returns the FLOPs of matmuls in a train step on all devices.

    Each token multiplies each element of a kernel once in the forward pass and
    twice in the backward pass. Attention multiplies queries by keys and
    probabilities by values; a causal mask saves nothing (the count of PaLM,
    Chowdhery et al. 2022, arXiv 2204.02311, appendix B).

    Args:
        elements: Int, the number of elements of all kernels of matmuls.
        tokens: Int, tokens in the global batch.
        layers: Int.
        width: Int, the size of all heads of queries together.
        length: Int, tokens of a sequence.
    """
    return (6 * elements + 12 * layers * width * length) * tokens


def step(accelerator, mesh, collectives, flops, utilization, is_fully_sharded):
    """Returns the bytes that a device sends in a step, and the seconds.

    A device waits for the collectives of the model axis. In `"efficiency"` it
    also waits for the data axis. In `"efficiency_hidden"` the data axis
    communicates during the backward pass, and the first gathers of FSDP during
    the forward pass. Then a device waits only for the rest.

    Args:
        accelerator: `Accelerator`.
        mesh: Pair of ints, the sizes of the data axis and the model axis.
        collectives: Dict of `"data"` and `"model"` to a dict of kind to
            `(number, bytes of the results)`, all of one device.
        flops: Float, FLOPs of one device.
        utilization: Float, the share of the peak that computations alone reach.
        is_fully_sharded: Boolean.

    Returns:
        Dict of `"sent"`, the bytes of each axis; `"seconds"` of each axis and
        of `"compute"`; and the two efficiencies: the share of the step in
        which a device computes.
    """
    replicas, parts = mesh
    compute = flops / utilization / accelerator.peak_flops("bf16")
    sent, seconds = {}, {"compute": compute}
    for axis, count, stride in ("model", parts, 1), ("data", replicas, parts):
        sent[axis] = bytes_sent(accelerator, collectives[axis], count)
        seconds[axis] = sent[axis] / accelerator.ring_speed(
            range(0, count * stride, stride)
        )
    beside = compute if is_fully_sharded else BACKWARD * compute
    waited = max(seconds["data"] - beside, 0)
    return {
        "sent": sent,
        "seconds": seconds,
        "efficiency": compute / sum(seconds.values()),
        "efficiency_hidden": compute / (compute + seconds["model"] + waited),
    }
