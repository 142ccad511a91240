"""Starts the processes of a run on this host, and ends them together."""

import collections
import contextlib
import os
import queue
import secrets
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time

from keras_tp.backend.processes import error_propagation
from keras_tp.backend.processes import failure_report
from keras_tp.backend.processes import rendezvous

# Signals from a terminal, a scheduler or a user.
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_FORWARDED = (signal.SIGUSR1, signal.SIGUSR2)
# Seconds that other processes have after the first error: to report their own
# errors, and then to end.
_SETTLE_S = 1.0
_GRACE_S = 2.0
# Seconds that processes have to handle a signal. Schedulers give a whole run 30
# seconds.
_SIGNAL_S = 8.0

_RUNNER = "keras_tp.backend.processes.child"
# The ports of runs. A system gives higher ones to outgoing connections.
PORTS = range(15000, 32000)

# The environment variables that describe the run to a process.
ADDRESSES = "KERAS_DISTRIBUTION_JOB_ADDRESSES"
COUNT = "KERAS_DISTRIBUTION_NUM_PROCESSES"
INDEX = "KERAS_DISTRIBUTION_PROCESS_ID"


def place_in_run(job_addresses=None, num_processes=None, process_id=None):
    """Returns the arguments of `initialize`, filled in from the environment."""
    given = os.environ
    if job_addresses is None:
        job_addresses = given.get(ADDRESSES)
    if num_processes is None and COUNT in given:
        num_processes = int(given[COUNT])
    if process_id is None and INDEX in given:
        process_id = int(given[INDEX])
    return job_addresses, num_processes, process_id


class Process(collections.namedtuple("Process", "index command environment")):
    """A process to start.

    Args:
        index: Int. Index among all processes of the run.
        command: List of strings.
        environment: Dict. Variables to add to the current environment.
    """

    def __str__(self):
        variables = [
            f"{name}={shlex.quote(value)}"
            for name, value in self.environment.items()
        ]
        return " ".join([*variables, shlex.join(self.command)])


class Plan(
    collections.namedtuple(
        "Plan",
        "devices processes hosts host_index dry_run all_output engine",
        defaults=[None],
    )
):
    """The devices, processes and hosts of a run.

    Args:
        devices: Int. Number of devices of the whole run.
        processes: Int. Number of processes of the whole run. `None` for as
            many as the backend needs.
        hosts: List of strings. `"host:port"` of each host. Empty if the run
            uses this host only.
        host_index: Int. Index of this host.
        dry_run: Boolean. Whether to print the commands and run nothing.
        all_output: Boolean. Whether all processes print, not only process 0.
        engine: String. The engine whose command to print. With it, `dry_run`
            is `True`. Defaults to `None`.
    """

    def with_processes(self):
        """Returns the plan with one process per host, if it sets no number."""
        count = self.processes or max(len(self.hosts), 1)
        return self._replace(processes=count)

    @property
    def processes_here(self):
        """Number of processes of this host."""
        return self.processes // max(len(self.hosts), 1)

    def addresses(self):
        """Returns the list of the `host:port` of all processes.

        The processes of one of several hosts have consecutive ports.
        """
        if not self.hosts:
            return [f"127.0.0.1:{port}" for port in free_ports(self.processes)]
        hosts = [host.rpartition(":") for host in self.hosts]
        return [
            f"{name}:{int(port) + local}"
            for name, _, port in hosts
            for local in range(self.processes_here)
        ]


def launch(plan, argv, environment):
    """Runs a script in the processes of this host; exits if one fails.

    Args:
        plan: `Plan`.
        argv: List of strings. The script and its arguments.
        environment: Function of the number of devices of a process and of its
            index on this host. It returns the environment variables to add.
    """
    if plan.processes == 1:
        processes = [
            Process(0, [sys.executable, *argv], environment(plan.devices, 0))
        ]
    else:
        processes = _processes(plan, argv, environment)
    if plan.dry_run:
        sys.stdout.write("".join(f"{process}\n" for process in processes))
        return
    if plan.processes_here == plan.processes:
        # Across hosts the secret has to be equal, so the user sets it.
        os.environ.setdefault(rendezvous.SECRET, secrets.token_hex(16))
    code = run(processes, plan.processes, plan.all_output)
    if code:
        sys.exit(code)


def _processes(plan, argv, environment):
    """Returns the list of `Process` of this host."""
    addresses = ",".join(plan.addresses())
    first = plan.host_index * plan.processes_here
    return [
        Process(
            index=first + local,
            command=[sys.executable, "-m", _RUNNER, *argv],
            environment={
                ADDRESSES: addresses,
                COUNT: str(plan.processes),
                INDEX: str(first + local),
                error_propagation.DEVICES: str(plan.devices),
                **environment(plan.devices // plan.processes, local),
            },
        )
        for local in range(plan.processes_here)
    ]


def run(processes, count, all_output=False):
    """Runs processes until all have ended, and ends all if one fails.

    This process forwards its signals to all of them. If a process that does
    not print fails without a Python error, its last output is shown.

    Args:
        processes: List of `Process`.
        count: Int. Number of processes of the whole run.
        all_output: Boolean. Whether all processes print. Defaults to `False`:
            only process 0 prints.

    Returns:
        Int. The exit code: 0, the code of the process that failed first, or
        128 plus the number of the signal that ended the run.
    """
    # Signal handlers may write to it at any moment: `SimpleQueue` is reentrant.
    events = queue.SimpleQueue()
    children = []
    handlers = {}
    with tempfile.TemporaryDirectory(prefix="keras_tp_") as folder:
        try:
            for number in (*_ENDING, *_FORWARDED):
                handlers[number] = signal.signal(
                    number, lambda number, frame: events.put(number)
                )
            for process in processes:
                is_quiet = process.index > 0 and not all_output
                children.append(_Child(process, folder, events, is_quiet))
            ended_by = _supervise(children, events)
            found = [child.failure() for child in children]
            first_code = failure_report.report(
                [failure for failure in found if failure], count, all_output
            )
            return 128 + ended_by if ended_by else first_code
        finally:
            for child in children:
                # Processes that the children started may still run.
                child.send(signal.SIGKILL)
            for number, handler in handlers.items():
                signal.signal(number, handler)


class _Child:
    """A process that the launcher has started.

    Attributes:
        failed_at: Float. Time when it failed, in seconds since the epoch.
            `None` if it did not fail, or if the launcher ended it.
    """

    def __init__(self, process, folder, events, is_quiet):
        self.index = process.index
        self.failed_at = None
        self.is_told_to_end = False
        self.is_running = True
        self._error_file = os.path.join(folder, f"{process.index}.error")
        self._output_file = None
        with contextlib.ExitStack() as stack:
            output = None
            if is_quiet:
                self._output_file = os.path.join(folder, f"{process.index}.out")
                output = stack.enter_context(open(self._output_file, "w"))
            self._popen = subprocess.Popen(
                process.command,
                env={
                    **os.environ,
                    **process.environment,
                    error_propagation.ERROR_FILE: self._error_file,
                    error_propagation.PARENT: str(os.getpid()),
                },
                stdout=output,
                stderr=output,
                # Terminal signals reach this process only, which forwards them.
                start_new_session=True,
            )
        threading.Thread(target=self._wait, args=(events,), daemon=True).start()

    @property
    def code(self):
        """Exit code of the process, as a shell reports it."""
        return failure_report.exit_code(self._popen.returncode)

    def _wait(self, events):
        self._popen.wait()
        if self.code and not self.is_told_to_end:
            self.failed_at = time.time()
        events.put(self)

    def send(self, number):
        """Sends a signal to the process and to all that it started."""
        self.is_told_to_end |= number in (*_ENDING, signal.SIGKILL)
        try:
            os.killpg(self._popen.pid, number)
        except ProcessLookupError:
            return

    def failure(self):
        """Returns a `failure_report.Failure`; `None` if it did not fail."""
        found = failure_report.told(self._error_file, self.index, self.code)
        if found is not None or self.failed_at is None:
            return found
        return failure_report.untold(
            failure_report.noted_end(self._error_file) or self.failed_at,
            self.index,
            self._popen.returncode,
            self._output_file,
        )


def _supervise(children, events):
    """Waits until all have ended; returns the signal that ended them, or 0."""
    ended_by = 0
    # Pairs of a time and the signal to send then, unless all have ended.
    plan = []
    while any(child.is_running for child in children):
        try:
            left = plan[0][0] - time.monotonic() if plan else None
            event = events.get(timeout=left and max(left, 0))
        except queue.Empty:
            _, number = plan.pop(0)
            for child in children:
                child.send(number)
            continue
        now = time.monotonic()
        if isinstance(event, _Child):
            event.is_running = False
            if event.code and not plan:
                plan = [
                    (now + _SETTLE_S, signal.SIGTERM),
                    (now + _SETTLE_S + _GRACE_S, signal.SIGKILL),
                ]
            continue
        for child in children:
            child.send(event)
        if event in _ENDING:
            # A second signal ends the processes at once.
            patience = 0 if plan else _SIGNAL_S
            ended_by = ended_by if plan else event
            plan = [(now + patience, signal.SIGKILL)]
    return ended_by


def free_ports(count):
    """Returns ports that nothing listens at.

    They are below the ports that a system gives to outgoing connections. A
    process takes its port seconds later, and such a connection may have it.
    """
    found = []
    while len(found) < count:
        port = PORTS.start + secrets.randbelow(len(PORTS))
        try:
            socket.create_server(("", port)).close()
        except OSError:
            continue
        if port not in found:
            found.append(port)
    return found
