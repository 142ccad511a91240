"""Runs a script in several processes through torchrun's launcher."""

import functools
import glob
import logging
import os
import secrets
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
from keras_tp.backend.processes import engine_commands
from keras_tp.backend.processes import error_propagation
from keras_tp.backend.processes import failure_report
from keras_tp.backend.processes.supervisor import free_ports

# Variables with which users choose torchrun's output. They have precedence.
_OUTPUT_VARIABLES = ("PET_LOCAL_RANKS_FILTER", "PET_REDIRECTS", "PET_TEE")
_LOGGER = "torch.distributed.elastic"
# Seconds that processes have to end after a signal or an error. A process that
# SIGSTOP has stopped uses all of them.
_SHUTDOWN_S = 5
_SHUTDOWN_VARIABLES = (
    "PET_SHUTDOWN_TIMEOUT",
    "TORCH_ELASTIC_SHUTDOWN_TIMEOUT",
)


def _hook_close(original):
    """Applies the shutdown timeout after errors; torchrun would wait 30 s."""

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
    """Runs a script in one process for each device of this host.

    If a process fails, torchrun ends the others. Then this process prints the
    first error, and exits with the exit code of the process that failed first.

    Args:
        plan: `supervisor.Plan`.
        argv: List of strings: the script and its arguments.

    Raises:
        ValueError: if the plan asks for more or fewer processes than devices.
    """
    if plan.processes not in (None, plan.devices):
        raise ValueError(
            "On torch each device has a process of its own. Leave "
            f"`--processes` out, or set it to {plan.devices}. Received: "
            f"--devices {plan.devices} --processes {plan.processes}"
        )
    if plan.engine is not None:
        engine_commands.show(plan._replace(processes=plan.devices), argv)
        return
    per_host = plan.devices // max(len(plan.hosts), 1)
    # Not `--standalone`: that rendezvous loads a pickle from a socket.
    hosts = plan.hosts or [f"127.0.0.1:{port}" for port in free_ports(1)]
    address, _, port = hosts[0].rpartition(":")
    where = [
        *("--nnodes", str(len(hosts))),
        *("--node-rank", str(plan.host_index)),
        *("--rdzv-backend", "static"),
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
    if not plan.hosts and "PET_RDZV_ID" not in os.environ:
        # Otherwise all runs would have the id "none".
        where += ["--rdzv-id", secrets.token_hex(8)]
    with tempfile.TemporaryDirectory(prefix="keras_tp_") as folder:
        if "PET_LOG_DIR" not in os.environ:
            where += ["--log-dir", folder]
        options = run.get_args_parser().parse_args([*where, script])
        # Not parsed, because torchrun's parser takes the script's `--log` for
        # an abbreviation of its own options.
        options.training_script_args = arguments
        # If it is unset, torchrun sets it with a warning.
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
    """Returns a sentence on how to run this script on several devices."""
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
    """Returns torchrun's options that hide the output of all but process 0."""
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
        # torchrun logs each process that it ends; the first error is enough.
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
    """Returns a list of `failure_report.Failure`, for this host's processes.

    Args:
        found: Dict of process index to torch's `ProcessFailure`.
        folder: String, the folder with the processes' error and log files.
        indices: Range. The indices of this host's processes.
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
            # A signal killed it before it could report. torchrun polls, so
            # the others may have noticed the end earlier than torchrun.
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
        # Timestamps are in whole seconds.
        if failure.exitcode == -signal.SIGKILL and later > patience - 2:
            continue
        kept[index] = failure
    return {next(iter(found)): first, **kept}
