"""The steps of a compiled HLO module, in the order in which they start."""

from keras_tp.backend import hlo
from keras_tp.backend import hlo_collectives
from keras_tp.backend import program_steps
from keras_tp.backend.jax import hlo_costs
from keras_tp.backend.program_steps import Step


def steps(text):
    """Returns the steps of one run of a module, loops and branches included.

    Args:
        text: String, text of an optimised HLO module with a schedule.

    Returns:
        List of `Step`.
    """
    module = hlo.Module(text)
    found = []
    _add(module, module.entry, 1, found, set())
    return found


def _add(module, computation, times, found, seen):
    for instruction in module.instructions(computation):
        done = hlo_collectives.start_of_done(instruction)
        if done:
            if any(step.name == done and step.is_started for step in found):
                found.append(Step(done, program_steps.DONE, times))
            continue
        if instruction.opcode in hlo.CONTROL:
            for name in instruction.called:
                if name in module:
                    inner = times * instruction.trips
                    _add(module, name, inner, found, seen)
            continue
        collectives = hlo_collectives.collectives_of(
            module, computation, instruction, seen
        )
        for collective in collectives:
            found.append(
                Step(
                    instruction.name,
                    collective.kind,
                    times,
                    bytes=sum(collective.sizes),
                    tensors=len(collective.sizes),
                    devices=collective.devices,
                    is_started=collective.is_started,
                )
            )
        # What runs beside computations is counted where it is used.
        if (
            instruction.opcode.endswith("-start")
            or hlo_collectives.is_collective(instruction)
            or any(collective.is_started for collective in collectives)
        ):
            continue
        flops = hlo_costs.flops(module, computation, instruction)
        moved = hlo_costs.moved_bytes(module, computation, instruction)
        if flops or moved:
            found.append(
                Step(
                    instruction.name,
                    program_steps.COMPUTE,
                    times,
                    dict(flops),
                    moved,
                    kernel=hlo_costs.kernel(instruction),
                )
            )
