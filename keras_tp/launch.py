"""Runs a script on several devices: `python -m keras_tp.launch`."""

import argparse
import difflib
import os

import keras

from keras_tp import backend
from keras_tp import script_backend
from keras_tp.backend.processes import engine_commands
from keras_tp.backend.processes import engines
from keras_tp.backend.processes import supervisor


def main(argv=None):
    """Parses a command line and runs its script.

    Args:
        argv: List of strings. Defaults to the command line of the process.
    """
    parser = argparse.ArgumentParser(
        prog="python -m keras_tp.launch",
        # A script's own options may be prefixes of these.
        allow_abbrev=False,
        description=(
            "Runs a script on several devices, in one process or in several, "
            "on one host or on several. Without accelerators, one process uses "
            "virtual CPU devices if the backend (KERAS_BACKEND) has them."
        ),
    )
    add = parser.add_argument
    add(
        "--devices",
        type=int,
        required=True,
        help="total number of devices of all processes",
    )
    add(
        "--processes",
        type=int,
        help="total number of processes on all hosts; by default one per host, "
        "and on torch one per device",
    )
    add(
        "--hosts",
        type=lambda value: value.split(","),
        default=[],
        metavar="HOST:PORT,...",
        help="addresses of all hosts; the processes meet at the first one. Run "
        "the same command on each host, with its own --host-index. A host with "
        "several processes also uses the next ports",
    )
    add(
        "--host-index",
        type=int,
        help="index of this host in --hosts, from 0",
    )
    add(
        "--dry-run",
        action="store_true",
        help="print the environment and command of each process and exit",
    )
    add(
        "--print-env",
        choices=engine_commands.ENGINES,
        help="print the command with which this engine starts the processes, "
        "and exit; the script has to call `distribution.initialize`",
    )
    add(
        "--all-output",
        action="store_true",
        help="show the output of every process, and every error with its "
        "traceback; by default, the output of process 0 and the first error",
    )
    add("script", help="Python file to run")
    add("args", nargs=argparse.REMAINDER, help="arguments of the script")
    options = parser.parse_args(argv)
    choice = script_backend.chosen_by(options.script)
    problem = (
        _problem(options)
        or _engine_started(options)
        or _no_script(options)
        or _other_backend(options.script, choice)
    )
    if problem:
        parser.error(problem)
    if _is_to_take(choice):
        parser.error(
            f"set {script_backend.VARIABLE}={choice.backend} before Python runs"
        )
    plan = supervisor.Plan(
        options.devices,
        options.processes,
        options.hosts,
        options.host_index or 0,
        options.dry_run or options.print_env is not None,
        options.all_output,
        options.print_env,
    )
    backend.distribution_lib.launch(plan, [options.script, *options.args])


def _problem(options):
    """Returns the first error in the options, or `None`."""
    devices, hosts = options.devices, options.hosts
    for name in ("devices", "processes"):
        value = getattr(options, name)
        if value is not None and value < 1:
            return f"--{name} must be at least 1, not {value}"
    for host in hosts:
        name, _, port = host.rpartition(":")
        if not name or not port.isdigit():
            return f"--hosts must be HOST:PORT,..., not {','.join(hosts)}"
    if not hosts and options.host_index is not None:
        return "--host-index is an index of --hosts; pass --hosts too"
    # An engine's command is the same on each host.
    index = 0 if options.print_env else options.host_index
    if hosts and index not in range(len(hosts)):
        return (
            f"--host-index must be from 0 to {len(hosts) - 1}, one for each "
            f"of --hosts, not {options.host_index}"
        )
    count = options.processes or len(hosts) or 1
    if hosts and count % len(hosts):
        return (
            f"{count} processes cannot be divided among {len(hosts)} hosts; "
            f"{_multiples(len(hosts))} processes can"
        )
    if devices % count:
        divisors = [n for n in range(1, devices + 1) if devices % n == 0]
        return (
            f"{devices} devices cannot be divided equally among {count} "
            f"processes. {devices} devices divide among {_listed(divisors)} "
            f"process(es), and {count} processes can have {_multiples(count)} "
            "devices"
        )
    return None


def _no_script(options):
    """Returns an error if the script is not there, or `None`.

    Commands that are only printed may be for another host.
    """
    script = options.script
    is_only_printed = options.dry_run or options.print_env is not None
    if is_only_printed or os.path.exists(script):
        return None
    folder, name = os.path.split(os.path.abspath(script))
    if not os.path.isdir(folder):
        return f"there is no script {script!r}: there is no folder {folder!r}"
    here = sorted(file for file in os.listdir(folder) if file.endswith(".py"))
    near = difflib.get_close_matches(name, here, n=1)
    hint = f". Did you mean {near[0]!r}?" if near else ""
    return f"there is no script {name!r} in the folder {folder!r}{hint}"


def _engine_started(options):
    """Returns an error if an engine started several launchers, or `None`.

    With `--hosts`, each of them starts the processes of its host.
    """
    engine = engines.find()
    starts_nothing = options.dry_run or options.print_env is not None
    if engine is None or engine.count < 2 or options.hosts or starts_nothing:
        return None
    return (
        f"{engine.name} has started {engine.count} processes, and the launcher "
        f"in each of them would start a run of its own. Let {engine.name} "
        f"start the script itself, with `{engine.command} -n {engine.count} "
        f"python {options.script}`: the script joins its processes with "
        "`distribution.initialize()`. Or start one launcher on each host, with "
        "--hosts and --host-index"
    )


def _other_backend(script, choice):
    """Returns an error if a script and the environment differ, or `None`.

    Keras is imported before the script runs.
    """
    name, chosen = script_backend.VARIABLE, choice.backend
    held = os.environ.get(name)
    if choice.replaces and held and held != chosen:
        return (
            f"{script} sets {name} to {chosen!r}, but the environment says "
            f"{held!r}. Remove one of them, or use "
            f'`os.environ.setdefault("{name}", "{chosen}")` in the script'
        )
    return None


def _is_to_take(choice):
    """Returns whether a script's backend is not the one that Keras has."""
    is_given = os.environ.get(script_backend.VARIABLE)
    return (
        not is_given
        and choice.backend is not None
        and choice.backend != keras.config.backend()
    )


def _multiples(count):
    return _listed([count, 2 * count, 3 * count]) + " and so on"


def _listed(numbers):
    return ", ".join(map(str, numbers))


if __name__ == "__main__":
    main()
