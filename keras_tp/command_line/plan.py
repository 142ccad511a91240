"""Prints how a model is split over a mesh, what it needs, and why."""

import sys

from keras_tp.command_line import options as shared
from keras_tp.distribution.accelerators import ACCELERATORS
from keras_tp.distribution.ahead_of_time import compile_for
from keras_tp.distribution.sharding_plan import plan_sharding
from keras_tp.distribution.tensor_layout import format_bytes

HELP = "how a model is split over a mesh"


def add_arguments(parser):
    """Adds the arguments of this command."""
    shared.add_model(parser)
    shared.add_mesh(parser, required=True)
    shared.add_step(parser)
    add = parser.add_argument
    add(
        "--fully-shard",
        action="store_true",
        help="also split variables over the batch axis (FSDP)",
    )
    add(
        "--sequence-parallel",
        action="store_true",
        help="split activations between layers along the sequence",
    )
    add("--json", action="store_true", help="print the plan as JSON only")
    add("--save", metavar="FILE", help="write the plan, for `plan=`")
    add("--html", metavar="FILE", help="write the plan as an HTML page")
    add(
        "--target",
        choices=list(ACCELERATORS),
        help="compile the train step for this accelerator, which need not be "
        "here (JAX only; needs --loss, or a model that is compiled)",
    )
    add("--loss", help="name of a Keras loss, for --target")


def run(options):
    """Plans the model and prints the plan; returns the exit code."""
    build_fn = shared.build_fn(options.model)
    plan = plan_sharding(
        build_fn,
        options.mesh,
        sequence_parallel=options.sequence_parallel,
        fully_shard=options.fully_shard,
    )
    if options.html:
        plan.to_html(
            options.html,
            options.batch_size,
            options.sequence_length,
            options.optimizer,
            options.target,
        )
        print(f"Written: {options.html}", file=sys.stderr)
    if options.save:
        plan.save(options.save)
        print(f"Written: {options.save}", file=sys.stderr)
    if options.json:
        print(plan.to_json())
        return 0
    print(plan.summary())
    print(_step(plan, options))
    if options.target:
        print(
            compile_for(
                build_fn,
                plan.distribution(),
                options.target,
                shared.count_of(options.mesh),
                batch_size=options.batch_size,
                sequence_length=options.sequence_length,
                optimizer=options.optimizer,
                loss=options.loss,
            )
        )
    return 0


def _step(plan, options):
    """Returns lines about a training step: memory and collectives."""
    sizes = options.batch_size, options.sequence_length
    if options.sequence_length is None and plan.needs_sequence_length:
        return (
            "The inputs have unknown dims beside the batch: pass "
            "--sequence-length to see memory and collectives."
        )
    length = f" of {sizes[1]}" if sizes[1] else ""
    memory = plan.memory(*sizes, optimizer=options.optimizer)
    parts = ", ".join(
        f"{name} {format_bytes(size)}"
        for name, size in memory.items()
        if name != "total"
    )
    lines = [
        f"A training step of {sizes[0]} samples{length} with "
        f"{options.optimizer}, on each device, as predicted:",
        f"  memory {format_bytes(memory['total'])}: {parts}",
    ]
    for kind, (count, size) in plan.collectives(*sizes).items():
        name = kind.replace("_", "-")
        lines.append(f"  {count} x {name}, {format_bytes(size)} together")
    return "\n".join(lines)
