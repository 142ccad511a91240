"""Counts the collectives of a compiled program of XLA in its optimised HLO."""

import collections

from keras_tp.backend import hlo

# HLO opcode -> the name that all backends use.
OPCODES = {
    "all-reduce": "all_reduce",
    "all-gather": "all_gather",
    "reduce-scatter": "reduce_scatter",
    "all-to-all": "all_to_all",
    "ragged-all-to-all": "all_to_all",
    "collective-permute": "collective_permute",
}
NAMES = tuple(dict.fromkeys(OPCODES.values()))
# On TPUs, a reduce-scatter is a fusion of an all-reduce and a slice.
_SCATTER_FUSION = "all-reduce-scatter"
# On TPUs, fusions start and end collectives that run beside computations.
_START_FUSION = "async-collective-start"
_DONE_FUSION = "async-collective-done"


class Collective(
    collections.namedtuple(
        "Collective", ["kind", "sizes", "devices", "is_started"]
    )
):
    """One collective instruction.

    Args:
        kind: String, such as `"all_reduce"`.
        sizes: List of ints, bytes of each result on one device.
        devices: Tuple of ints, the devices of one group.
        is_started: Boolean, whether another instruction waits for its end.
    """


def count(text):
    """Counts the collectives that one run of an HLO module executes.

    A combined operation counts once for each of its tensors, an operation in a
    loop once for each iteration. Groups of one device communicate nothing and
    are not counted.

    Args:
        text: String, text of an optimised HLO module.

    Returns:
        Dict of the collective's name to `(count, bytes)`, with the bytes of
        the results on one device.
    """
    module = hlo.Module(text)
    total = {name: [0, 0] for name in NAMES}
    _count(module, module.entry, 1, set(), total)
    return {name: tuple(pair) for name, pair in total.items()}


def _count(module, computation, times, seen, total):
    for instruction in module.instructions(computation):
        for found in collectives_of(module, computation, instruction, seen):
            total[found.kind][0] += times * len(found.sizes)
            total[found.kind][1] += times * sum(found.sizes)
        if instruction.opcode in hlo.CONTROL:
            for name in instruction.called:
                if name in module:
                    inner = times * instruction.trips
                    _count(module, name, inner, seen, total)


def collectives_of(module, computation, instruction, seen):
    """Returns the collectives of one instruction, and of what it fuses.

    Args:
        module: `hlo.Module`.
        computation: String, name of the computation with the instruction.
        instruction: `hlo.Instruction`.
        seen: Set, to which this adds. The compiler for TPUs clones collectives
            into the fusions that start and end them; a clone is not counted.

    Returns:
        List of `Collective`.
    """
    found = _collective(module, computation, instruction)
    if found is not None:
        key = _key(instruction, found)
        if key is None or key not in seen:
            seen.add(key)
            return [found] if len(found.devices) != 1 else []
        return []
    if instruction.opcode in hlo.CONTROL or instruction.opcode == "reduce":
        return []
    inside = []
    for name in instruction.called:
        if name not in module:
            continue
        for inner in module.instructions(name):
            inside += collectives_of(module, name, inner, seen)
    if any(name.startswith(_SCATTER_FUSION) for name in instruction.called):
        sizes = [array.nbytes for array in instruction.results]
        return [
            one._replace(kind="reduce_scatter", sizes=sizes) for one in inside
        ]
    if instruction.opcode == "async-start" or instruction.name.startswith(
        _START_FUSION
    ):
        return [one._replace(is_started=True) for one in inside]
    return inside


def is_collective(instruction):
    """Returns whether an instruction is a collective, or starts one."""
    return instruction.opcode.removesuffix("-start") in OPCODES


def start_of_done(instruction):
    """Returns the name of the start that a "done" ends; `None` for others."""
    if instruction.opcode.endswith("-done") and instruction.operands:
        return instruction.operands[0]
    if instruction.name.startswith(_DONE_FUSION):
        return instruction.name.replace(_DONE_FUSION, _START_FUSION)
    return None


def _collective(module, computation, instruction):
    opcode = instruction.opcode.removesuffix("-start")
    if opcode not in OPCODES:
        return None
    is_start = opcode != instruction.opcode
    sizes = [array.nbytes for array in instruction.results]
    inner = [
        row
        for name in instruction.called
        if name in module
        for row in module.instructions(name)
        if row.opcode == opcode
    ]
    if is_start and inner:
        sizes = [array.nbytes for array in inner[0].results]
    elif is_start and opcode == "collective-permute":
        sizes = sizes[1:2]
    elif is_start and opcode != "all-reduce":
        # A start operation returns its operands, then its results.
        sizes = sizes[len(sizes) // 2 :]
    if opcode == "all-reduce" and _is_of_one_dim(instruction):
        # On GPUs, small tensors are summed as parts of one.
        parts = module.joined(computation, instruction.operands[0])
        sizes = [array.nbytes for array in parts] or sizes
    group = (inner[0] if inner else instruction).group
    if not group:
        group = tuple(range(module.device_count))
    return Collective(
        OPCODES[opcode],
        sizes,
        group,
        is_start and '"is_sync":true' not in instruction.text,
    )


def _is_of_one_dim(instruction):
    """Returns whether XLA made an all-reduce of one array of one dim.

    It has no name of an operation then.
    """
    shapes = [array.shape for array in instruction.results]
    is_named = instruction.attribute(r'op_name="([^"]+)"')
    return len(shapes) == 1 and len(shapes[0]) == 1 and not is_named


def _key(instruction, found):
    """Returns a key that a collective and its clones share, or `None`.

    Collectives of `shard_map` have one channel, and those of one layer have
    one name, so the key also has their devices and sizes.
    """
    channel = instruction.attribute(r"channel_id=(\d+)")
    name = instruction.attribute(r'op_name="([^"]*)"')
    is_of_tpu = ":T(" in instruction.text
    key = (channel, name, found.kind, found.devices, *found.sizes)
    return key if channel and is_of_tpu else None
