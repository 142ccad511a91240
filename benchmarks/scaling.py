"""Scales train steps to 4096 devices on paper, from counted bytes and FLOPs.

    pip install '.[jax,hub,ahead]'
    python benchmarks/scaling.py --json scaling.json --plot scaling.svg
    python benchmarks/scaling.py --check    # the law against programs

Plans give the bytes, without weights; `keras_tp/distribution/accelerators.py`
has the links. `scaling_law.py` has the law. Nothing
here is measured on devices: `benchmarks/README.md` says where it stops.
"""

import argparse
import collections
import json
import math
import os
import pathlib
import sys

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# For `--check`.
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

# Chooses JAX, before Keras is imported.
import compile_for
import keras_hub
import scaling_law
import scaling_plot
import sequence_parallel
from rich.console import Console
from rich.table import Table

from keras_tp import distribution
from keras_tp.distribution import accelerators
from keras_tp.distribution.planning import fully_sharded

# Of activations and gradients, as in mixed precision on H100. The variables
# of the optimizer are of float32.
DTYPE = "bfloat16"
STATE_DTYPE = "float32"
DEVICES = (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
SHOWN = (8, 64, 512, 4096)
WAYS = sequence_parallel.WAYS


class Case(
    collections.namedtuple("Case", "build depth width length batch is_text")
):
    """A model and its batch.

    Args:
        build: Function of the depth and the dtype that builds it.
        depth: Int, the number of layers.
        width: Int, the size of all heads of queries together.
        length: Int, tokens of a sequence.
        batch: Int, sequences for each device; a replica has this many times
            the size of the model axis.
        is_text: Boolean. Whether the length is an unknown dim of the inputs.
    """

    @property
    def sequence_length(self):
        """The `sequence_length` of `plan_sharding`'s predictions."""
        return self.length if self.is_text else None


def vit_giant(depth, dtype):
    """Returns a ViT-G/14 (Zhai et al. 2022), without its class token."""
    backbone = keras_hub.models.ViTBackbone(
        image_shape=(224, 224, 3),
        patch_size=14,
        num_layers=depth,
        num_heads=16,
        hidden_dim=1664,
        mlp_dim=8192,
        # 256 positions are split along the sequence, 257 are not.
        use_class_token=False,
        dtype=dtype,
    )
    return keras_hub.models.ViTImageClassifier(
        backbone, 1000, pooling="gap", preprocessor=None, dtype=dtype
    )


CASES = {
    "Llama 3 8B": Case(compile_for.LLAMA_8B, 32, 4096, 2048, 1, True),
    "Llama 3 70B": Case(compile_for.LLAMA_70B, 80, 8192, 2048, 1, True),
    "ViT-G/14": Case(vit_giant, 48, 1664, 256, 32, False),
}


def plan_of(case, shape, dtype=DTYPE, **way):
    """Returns the plan of a model on a mesh of data and model axis."""
    devices = [f"gpu:{i}" for i in range(shape[0] * shape[1])]
    return distribution.plan_sharding(
        lambda: case.build(case.depth, dtype),
        distribution.DeviceMesh(shape, ["batch", "model"], devices),
        **way,
    )


def collectives_of(plan, batch_size, sequence_length=None):
    """Returns the collectives of a train step on one device, by mesh axis.

    Returns:
        Dict of `"model"` and `"data"` to a dict of kind to `(number, bytes of
        the results)`.
    """
    of_variables = fully_sharded.collectives(plan, "batch")
    data = {k: (len(sizes), sum(sizes)) for k, sizes in of_variables.items()}
    total = plan.collectives(batch_size, sequence_length)
    model = {
        kind: tuple(a - b for a, b in zip(total.get(kind, (0, 0)), pair))
        for kind, pair in data.items()
    }
    return {"model": model, "data": data}


def kernel_elements(case):
    """Returns the number of elements of all kernels of matmuls.

    They are those that the backward pass of FSDP gathers again.
    """
    plan = plan_of(case, (1, 1), fully_shard=True)
    return sum(math.prod(v.shape) for v in plan.variables if v.gathered_again)


def row_of(name, accelerator, shape, way, elements, utilization):
    """Returns a row of the results: a model, a mesh and a way to split it."""
    case, count = CASES[name], math.prod(shape)
    batch_size = case.batch * count
    plan = plan_of(case, shape, **WAYS[way])
    collectives = collectives_of(plan, batch_size, case.sequence_length)
    memory = plan.memory(batch_size, case.sequence_length, dtype=STATE_DTYPE)
    tokens = batch_size * case.length
    flops = scaling_law.train_flops(
        elements, tokens, case.depth, case.width, case.length
    )
    found = scaling_law.step(
        accelerator,
        shape,
        collectives,
        flops / count,
        utilization,
        "fully_shard" in WAYS[way],
    )
    return {
        "model": name,
        "target": accelerator.name,
        "devices": count,
        "mesh": shape,
        "way": way,
        "tokens": tokens,
        "flops": flops / count,
        "collectives": collectives,
        "is_predicted": all(v.is_predicted for v in plan.variables),
        "memory": memory,
        "fits": memory["total"] <= accelerator.memory,
        **found,
    }


def rows_of(options):
    """Yields a row for each model, way, size of the model axis and devices."""
    accelerator = accelerators.accelerator(options.target)
    for name in options.models:
        elements = kernel_elements(CASES[name])
        for way in WAYS:
            for parts in options.model_axis:
                if parts > accelerator.node_size:
                    raise ValueError(
                        "The model axis has to stay inside of a node of "
                        f"{accelerator.node_size} devices. Received: "
                        f"--model-axis {parts}"
                    )
                for count in options.devices:
                    if parts == 1 and "sequence_parallel" in WAYS[way]:
                        continue
                    shape = (count // parts, parts)
                    args = name, accelerator, shape, way, elements
                    yield row_of(*args, options.utilization)


COLUMNS = {
    "model": lambda row: row["model"],
    "way": lambda row: row["way"] + ("" if row["is_predicted"] else " *"),
    "data x model": lambda row: "{} x {}".format(*row["mesh"]),
    "tokens": lambda row: f"{row['tokens'] / 2**20:.2f} Mi",
    "sent, model / data, GiB": lambda row: " / ".join(
        f"{row['sent'][axis] / 2**30:.2f}" for axis in ("model", "data")
    ),
    "computes, ms": lambda row: f"{1000 * row['seconds']['compute']:.0f}",
    "sends, model / data, ms": lambda row: " / ".join(
        f"{1000 * row['seconds'][axis]:.0f}" for axis in ("model", "data")
    ),
    "efficiency": lambda row: f"{row['efficiency']:.0%}",
    "data axis hidden": lambda row: f"{row['efficiency_hidden']:.0%}",
    "state + activations, GiB": lambda row: " + ".join(
        f"{size / 2**30:.1f}"
        for size in (
            row["memory"]["total"] - row["memory"]["activations"],
            row["memory"]["activations"],
        )
    ),
}


def print_table(rows, options):
    """Prints the rows, and how to read them."""
    accelerator = accelerators.accelerator(options.target)
    table = Table(title=f"On paper: {accelerator.title}")
    for index, heading in enumerate(COLUMNS):
        table.add_column(heading, justify="left" if index < 3 else "right")
    for row in rows:
        table.add_row(*(cell(row) for cell in COLUMNS.values()))
    console = Console(width=None if sys.stdout.isatty() else 180)
    console.print(table)
    console.print(
        f"Computations reach {options.utilization:.0%} of the peak by "
        "assumption. Efficiency is the share of a step in which a device "
        "computes: if it waits for all collectives, and if those of the data "
        "axis run beside computations. Memory is the plan's estimate, without "
        f"rematerialization; a device has {accelerator.memory / 2**30:.1f} "
        "GiB. *: the plan does not predict all collectives of this way.",
        highlight=False,
    )


def parse_options():
    """Returns the options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--models", nargs="*", default=list(CASES), choices=CASES)
    add("--target", default="h100", choices=accelerators.ACCELERATORS)
    add("--devices", nargs="*", type=int, default=DEVICES)
    add("--model-axis", nargs="*", type=int, default=[8])
    add("--utilization", type=float, default=0.5, help="of the peak FLOPs")
    add("--all", action="store_true", help="print all numbers of devices")
    add("--json", metavar="FILE", help="where to write all rows")
    add("--plot", metavar="FILE", help="where to draw them, as SVG")
    add("--check", action="store_true", help="compare the law, and exit")
    return parser.parse_args()


def main():
    """Prints the table, or checks the law."""
    options = parse_options()
    if options.check:
        # It imports this module.
        import scaling_check

        sys.exit(scaling_check.main())
    rows = list(rows_of(options))
    given = options.all or tuple(options.devices) != DEVICES
    shown = [row for row in rows if given or row["devices"] in SHOWN]
    print_table(shown, options)
    if options.json:
        pathlib.Path(options.json).write_text(json.dumps(rows, indent=1) + "\n")
    if options.plot:
        pathlib.Path(options.plot).write_text(scaling_plot.draw(rows))


if __name__ == "__main__":
    main()
