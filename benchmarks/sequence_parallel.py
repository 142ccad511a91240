"""Compiles steps with sequence parallelism and FSDP, without their devices.

    pip install '.[jax,hub,ahead]'
    python benchmarks/sequence_parallel.py --targets h100,v5e

Prints a table with the collectives of one layer and the memory of one device.
The models are those of `compile_for.py`; two shallow ones give the law of a
deep one.
"""

import argparse

import compile_for

from keras_tp import distribution

WAYS = {
    "tensor parallel": {},
    "and sequence parallel": {"sequence_parallel": True},
    "tensor parallel and FSDP": {"fully_shard": True},
    "all three": {"sequence_parallel": True, "fully_shard": True},
}
COLUMNS = (
    "model",
    "mesh",
    "way",
    "collectives of a layer",
    "GiB sent",
    "arguments, GiB",
    "temporaries, GiB",
    "peak, GiB",
    "plan's activations, GiB",
    "step, ms",
)


def row(name, shape, target, way):
    """Returns a row of the table, and prints it."""
    build, depth, batch_size, length, *_ = compile_for.MODELS[name]
    devices = [f"gpu:{i}" for i in range(shape[0] * shape[1])]
    mesh = distribution.DeviceMesh(shape, ["batch", "model"], devices)
    report = distribution.compile_for(
        build,
        distribution.TensorParallel(mesh, **WAYS[way]),
        target,
        batch_size=batch_size,
        sequence_length=length,
        loss=compile_for.LOSS,
        depth=depth,
    )
    plan = distribution.plan_sharding(
        lambda: build(depth), mesh, **WAYS[way]
    ).memory(batch_size, length)
    sent = sum(found["bytes"] for found in report.collectives.values())
    memory = report.memory
    cells = [
        name,
        f"{shape[0]} x {shape[1]} {target}",
        way,
        compile_for.kinds(report.collectives_per_layer()),
        *(
            f"{size / 2**30:.2f}"
            for size in (
                sent,
                memory["arguments"],
                memory["temporaries"],
                memory["peak"],
                plan["activations"],
            )
        ),
        f"{1000 * report.seconds['step']:.0f}",
    ]
    print("| " + " | ".join(cells) + " |", flush=True)


def main():
    """Prints the table of all models, targets and ways."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default="Llama 3 8B")
    parser.add_argument("--targets", default="h100")
    options = parser.parse_args()
    print("| " + " | ".join(COLUMNS) + " |")
    print("|" + "---|" * len(COLUMNS))
    for name in options.models.split(","):
        for target in options.targets.split(","):
            for way, arguments in WAYS.items():
                is_full = "fully_shard" in arguments
                row(name, (2, 4) if is_full else (1, 8), target, way)


if __name__ == "__main__":
    main()
