"""Runs a script in several processes through torchrun's launcher."""

from torch.distributed import run

from keras_tp.backend import commands


def launch(device_count, argv):
    """Runs a script in one process per device, on this machine.

    If a process fails, torchrun ends the others, reports the first failure
    and this process exits with an error.

    Args:
        device_count: Int, number of processes.
        argv: List of strings: the script and its arguments.
    """
    script, *arguments = argv
    options = run.get_args_parser().parse_args(
        ["--standalone", "--nproc-per-node", str(device_count), script]
    )
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
