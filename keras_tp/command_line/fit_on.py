"""Finds the least number of devices on which a model can be trained.

For 1, 2, 4 and more devices it plans the model on each mesh with axes `batch`
and `model`, with and without `fully_shard`, and predicts the memory of a
training step. No weights are allocated, and no device has to be here.
"""

import collections

from keras_tp.command_line import options as shared
from keras_tp.distribution.device_mesh import mesh_of_first_devices
from keras_tp.distribution.planning import tables
from keras_tp.distribution.sharding_plan import plan_sharding
from keras_tp.distribution.tensor_layout import format_bytes

HELP = "how many devices a model needs to be trained"

Candidate = collections.namedtuple(
    "Candidate", "data model fully_shard memory sent"
)


def add_arguments(parser):
    """Adds the arguments of this command."""
    shared.add_model(parser)
    add = parser.add_argument
    add(
        "--memory",
        required=True,
        type=shared.argument(shared.memory_of),
        help="memory of one device: `80GB`, `16GiB`, or the name of an "
        "accelerator such as `h100`",
    )
    shared.add_step(parser)
    add(
        "--spare",
        type=float,
        default=0.1,
        help="share of the memory to leave free (default: %(default)s)",
    )
    add(
        "--max-model",
        type=int,
        default=8,
        help="largest `model` axis, the devices that fast links join "
        "(default: %(default)s)",
    )
    add(
        "--max-devices",
        type=int,
        default=256,
        help="where to stop (default: %(default)s)",
    )


def run(options):
    """Prints what fits; returns 1 if nothing does."""
    if not 0 <= options.spare < 1:
        raise shared.UsageError(
            "--spare is a share of the memory, from 0 up to 1. Received: "
            f"{options.spare}"
        )
    limit = options.memory * (1 - options.spare)
    build_fn = shared.build_fn(options.model)
    found = []
    count = 1
    while count <= options.max_devices:
        found += candidates(build_fn, options, count)
        if any(one.memory["total"] <= limit for one in found):
            break
        count *= 2
    print(_table(found, limit))
    fitting = [one for one in found if one.memory["total"] <= limit]
    if not fitting:
        print(_nothing_fits(found, limit, options))
        return 1
    print(_advice(min(fitting, key=lambda one: one.sent), options))
    return 0


def candidates(build_fn, options, count):
    """Returns a `Candidate` for each way to use a number of devices."""
    found = []
    model = 1
    while model <= min(count, options.max_model):
        data = count // model
        for fully_shard in (False, True)[: 1 + (data > 1)]:
            if options.batch_size % data == 0:
                shape = data, model
                found.append(_candidate(build_fn, options, shape, fully_shard))
        model *= 2
    return found


def _candidate(build_fn, options, shape, fully_shard):
    plan = plan_sharding(
        build_fn,
        mesh_of_first_devices(shape, ["batch", "model"]),
        fully_shard=fully_shard,
    )
    sizes = options.batch_size, options.sequence_length
    if options.sequence_length is None and plan.needs_sequence_length:
        raise shared.UsageError(
            "The inputs have unknown dims beside the batch: pass "
            "--sequence-length"
        )
    memory = plan.memory(*sizes, optimizer=options.optimizer)
    sent = sum(size for _, size in plan.collectives(*sizes).values())
    return Candidate(*shape, fully_shard, memory, sent)


def _table(found, limit):
    parts = "parameters", "gradients", "slots", "activations", "gathered"
    columns = {
        "batch x model": tables.RIGHT,
        "FSDP": {},
        **dict.fromkeys((*parts, "total", "collectives"), tables.RIGHT),
        "fits": {},
    }
    rows = [
        (
            f"{one.data} x {one.model}",
            "yes" if one.fully_shard else "",
            *(format_bytes(one.memory.get(name, 0)) for name in parts),
            format_bytes(one.memory["total"]),
            format_bytes(one.sent),
            "yes" if one.memory["total"] <= limit else "",
        )
        for one in found
    ]
    title = "Bytes of a training step on each device, predicted"
    return tables.text_of((title, columns, rows))


def _advice(one, options):
    count, total = one.data * one.model, format_bytes(one.memory["total"])
    axes = '["batch", "model"]'
    fully_shard = ", fully_shard=True" if one.fully_shard else ""
    return (
        f"{count} device(s) are enough: {total} of "
        f"{format_bytes(options.memory)}. Of the meshes that fit, this one "
        "communicates least:\n\n"
        f"    mesh = DeviceMesh(({one.data}, {one.model}), {axes})\n"
        f"    set_distribution(TensorParallel(mesh{fully_shard}))"
    )


def _nothing_fits(found, limit, options):
    if not found:
        return (
            f"No mesh was tried: --max-devices {options.max_devices}, "
            f"--max-model {options.max_model}, and data parallel replicas "
            f"have to divide --batch-size {options.batch_size}."
        )
    one = min(found, key=lambda one: one.memory["total"])
    name = max(
        (name for name in one.memory if name != "total"), key=one.memory.get
    )
    return (
        f"Nothing fits into {format_bytes(int(limit))} with up to "
        f"{options.max_devices} devices. The least is "
        f"{format_bytes(one.memory['total'])}, on {one.data} x {one.model}; "
        f"most of it are {name}. Smaller batches, keras.RematScope, a smaller "
        "dtype or an optimizer with fewer slots (--optimizer) need less."
    )
