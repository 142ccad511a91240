"""Runs a script in several processes through torchrun's launcher."""

import functools
import glob
import logging
import os
import shlex
import signal
import sys
import tempfile

from torch.distributed import run
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from keras_tp.backend import hooks
from keras_tp.backend.hooks import Hook
from keras_tp.backend.processes import commands
from keras_tp.backend.processes import error_propagation
from keras_tp.backend.processes import failure_report

# What users set for torchrun to choose what is printed. It is left to them.
_OUTPUT_VARIABLES = ("PET_LOCAL_RANKS_FILTER", "PET_REDIRECTS", "PET_TEE")
_LOGGER = "torch.distributed.elastic"
# How long processes have to end after a signal or an error, in seconds. A
# process that is stopped needs all of it.
_SHUTDOWN_S = 5
_SHUTDOWN_VARIABLES = (
    "PET_SHUTDOWN_TIMEOUT",
    "TORCH_ELASTIC_SHUTDOWN_TIMEOUT",
)


def _hook_close(original):
    """torchrun's time to end is for signals; after an error it takes 30 s."""

    @functools.wraps(original)
    def close(self, death_sig=None, timeout=_SHUTDOWN_S):
        original(self, death_sig, min(timeout, _shutdown_seconds()))

    return close


TABLE = [
    Hook(
        "torch.distributed.elastic.multiprocessing.api:PContext",
        "close",
        _hook_close,
        "a process that is stopped does not hold up the end of the others",
    ),
]


def launch(plan, argv):
    """Runs a script in one process per device: those of this host.

    If a process fails, torchrun ends the others. Then the first error is
    printed, and this process exits with the exit code that goes with it.

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
    first = plan.host_index * per_host
    where += ["--nproc-per-node", str(per_host)]
    where += _redirects(plan, first, per_host)
    where += ["--shutdown-timeout", str(_shutdown_seconds())]
    script, *arguments = argv
    if plan.dry_run:
        command = [sys.executable, "-m", "torch.distributed.run", *where]
        sys.stdout.write(shlex.join([*command, script, *arguments]) + "\n")
        return
    with tempfile.TemporaryDirectory(prefix="keras_tp_") as folder:
        if "PET_LOG_DIR" not in os.environ:
            where += ["--log-dir", folder]
        options = run.get_args_parser().parse_args([*where, script])
        # Not parsed: torchrun's parser takes a `--log` of the script for an
        # abbreviation of its own options.
        options.training_script_args = arguments
        # Or torchrun sets it, with a warning.
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        os.environ[error_propagation.ERROR_FILE] = os.path.join(
            folder, "$RANK.error"
        )
        os.environ[error_propagation.PARENT] = str(os.getpid())
        code = _run(options, plan, folder, range(first, first + per_host))
    if code:
        sys.exit(code)


def _shutdown_seconds():
    for name in _SHUTDOWN_VARIABLES:
        if os.environ.get(name, "").isdigit():
            return int(os.environ[name])
    return _SHUTDOWN_S


def how_to_launch(device_count):
    """Returns the sentence that says how to run this script on devices.

    Args:
        device_count: Int, number of devices.
    """
    if commands.in_notebook():
        return (
            "On torch each device has a process of its own, and a notebook is "
            f"one process. To run on {device_count} devices, put the code into "
            f"a script: `{commands.launch(device_count)}`."
        )
    torchrun = f"torchrun --nproc-per-node {device_count} {commands.script()}"
    return (
        f"To run on {device_count} devices: "
        f"`{commands.launch(device_count)}`, or `{torchrun}`."
    )


def _redirects(plan, first, per_host):
    """Returns torchrun's option that has all but process 0 write to files."""
    quiet = [local for local in range(per_host) if first + local > 0]
    if plan.all_output or not quiet:
        return []
    if any(name in os.environ for name in _OUTPUT_VARIABLES):
        return []
    both = 3
    return ["--redirects", ",".join(f"{local}:{both}" for local in quiet)]


def _run(options, plan, folder, indices):
    """Runs torchrun with its options; returns the exit code of the run."""
    if not plan.all_output:
        # It reports each process that it ends. The first error says why.
        for name in list(logging.root.manager.loggerDict):
            if name.startswith(_LOGGER):
                logging.getLogger(name).setLevel(logging.CRITICAL)
    ended_by, found = 0, {}
    hooks.install(TABLE)
    try:
        run.run(options)
        return 0
    except ChildFailedError as e:
        found = e.failures
    except SignalException as e:
        ended_by = e.sigval
    finally:
        hooks.uninstall()
    found = _without_ended(found, options.shutdown_timeout)
    code = failure_report.report(
        _failures(found, folder, indices), plan.devices, plan.all_output
    )
    return 128 + ended_by if ended_by else code or 1


def _failures(found, folder, indices):
    """Returns the list of `failures.Failure` of the processes of this host.

    Args:
        found: Dict of the index of a process to torch's `ProcessFailure`.
        folder: String, the folder with what processes wrote.
        indices: Range of the indices of the processes of this host.
    """
    told = {}
    for index in indices:
        code = found[index].exitcode if index in found else 0
        path = os.path.join(folder, f"{index}.error")
        told[index] = failure_report.told(
            path, index, failure_report.exit_code(code)
        )
    result = [failure for failure in told.values() if failure]
    began = min((failure.at for failure in result), default=None)
    for index, failure in found.items():
        if told[index]:
            continue
        path = os.path.join(folder, f"{index}.error")
        at = failure_report.noted_end(path) or failure.timestamp
        if began is not None and failure.exitcode < 0:
            # It told nobody, and torchrun looks only now and then: the others
            # may have noticed earlier that it was gone.
            at = min(at, began - 1)
        local = index - indices.start
        output = glob.glob(
            os.path.join(folder, "*", "attempt_*", str(local), "stderr.log")
        )
        result.append(
            failure_report.untold(at, index, failure.exitcode, *output[:1])
        )
    return result


def _without_ended(found, patience):
    """Leaves out the processes that torchrun ended after the first failure."""
    if not found:
        return found
    (_, first), *others = found.items()
    kept = {}
    for index, failure in others:
        if failure.exitcode == -signal.SIGTERM:
            continue
        later = failure.timestamp - first.timestamp
        # In whole seconds.
        if failure.exitcode == -signal.SIGKILL and later > patience - 2:
            continue
        kept[index] = failure
    return {next(iter(found)): first, **kept}
