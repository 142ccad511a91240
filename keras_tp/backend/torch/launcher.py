"""Runs a script in several processes through torchrun's launcher."""

import shlex
import sys

from torch.distributed import run

from keras_tp.backend import commands


def launch(plan, argv):
    """Runs a script in one process per device: those of this host.

    If a process fails, torchrun ends the others, reports the first failure
    and this process exits with an error.

    Args:
        plan: `supervision.Plan`.
        argv: List of strings: the script and its arguments.

    Raises:
        ValueError: if there are to be more processes than devices, or fewer.
    """
    if plan.processes not in (None, plan.devices):
        raise ValueError(
            "On torch each device has a process of its own. Leave "
            f"`--processes` out, or ask for {plan.devices}. Received: "
            f"--devices {plan.devices} --processes {plan.processes}"
        )
    per_host = plan.devices // max(len(plan.hosts), 1)
    where = ["--standalone"]
    if plan.hosts:
        address, _, port = plan.hosts[0].rpartition(":")
        where = [
            *("--nnodes", str(len(plan.hosts))),
            *("--node-rank", str(plan.host_index)),
            *("--master-addr", address, "--master-port", port),
        ]
    script, *arguments = argv
    given = [*where, "--nproc-per-node", str(per_host), script]
    if plan.dry_run:
        command = [sys.executable, "-m", "torch.distributed.run"]
        sys.stdout.write(shlex.join([*command, *given, *arguments]) + "\n")
        return
    options = run.get_args_parser().parse_args(given)
    # Not parsed: torchrun's parser takes a `--log` of the script for an
    # abbreviation of its own options.
    options.training_script_args = arguments
    run.run(options)


def how_to_launch(device_count):
    """Returns the sentence that says how to run this script on devices.

    Args:
        device_count: Int, number of devices.
    """
    torchrun = f"torchrun --nproc-per-node {device_count} {commands.script()}"
    return (
        f"To run on {device_count} devices: "
        f"`{commands.launch(device_count)}`, or `{torchrun}`."
    )
