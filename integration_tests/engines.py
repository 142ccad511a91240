"""Runs `examples/engines/train.py` by an engine, and prints what happened.

    python -m integration_tests.engines openmpi [BACKEND...]
    python -m integration_tests.engines slurm [BACKEND...]
    python -m integration_tests.engines ray [BACKEND...]
    python -m integration_tests.engines "ray train" torch
    python -m integration_tests.engines k8s [BACKEND...]
    python -m integration_tests.engines torchrun torch

`shell/engines/` has a script for each engine, which starts its daemons if it
has any. KERAS_TP_ENGINE_PROCESSES says how many processes there are, by default
4; KERAS_TP_ENGINE_CHECKS which checks are made, by default all.
"""

import ast
import importlib
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import time

from integration_tests.engine_runs import COUNT
from integration_tests.engine_runs import INDEX
from integration_tests.engine_runs import SCRIPT
from integration_tests.engine_runs import START_S
from integration_tests.engine_runs import Pods
from integration_tests.engine_runs import Run
from integration_tests.engine_runs import environment
from integration_tests.engine_runs import printed
from integration_tests.engine_runs import said
from integration_tests.engine_runs import start
from integration_tests.engine_runs import start_printed
from keras_tp.backend.processes import supervisor

BACKENDS = ("jax", "tensorflow", "torch")
# Seconds in which all processes end after one is lost.
END_S = 10
# Seconds in which they end if the engine leaves it to them: KERAS_TP_TIMEOUT,
# and what `docs/processes.md` adds.
UNAIDED_S = 60
KUBERNETES = "1.31"


def losses(output):
    """Returns the losses that each process printed, with the devices."""
    found = re.findall(r"(\d+) devices, losses (\[[^\]]*\])", output)
    return [(int(count), ast.literal_eval(values)) for count, values in found]


def one_process(backend, epochs=3):
    """Returns the losses of one process without an engine."""
    result = subprocess.run(
        [sys.executable, SCRIPT, "--epochs", str(epochs)],
        env=environment(backend),
        capture_output=True,
        text=True,
        timeout=START_S,
    )
    assert result.returncode == 0, result.stderr
    ((count, values),) = losses(result.stdout)
    assert count == 1
    return values


def check_losses(engine, backend, folder):
    """Compares all processes with one."""
    want = one_process(backend)
    run = start(engine, backend, folder)
    try:
        run.seconds_to_end(time.monotonic())
        assert run.succeeded(), run.output
        return _compared(run.output, want)
    finally:
        run.kill()


def check_printed(engine, backend, folder):
    """Runs the command that `launch --print-env` prints."""
    processes = COUNT if backend == "torch" else COUNT // 2
    want = one_process(backend)
    arguments = ("--backup", folder)
    run = start_printed(engine, backend, folder, processes, *arguments)
    try:
        run.seconds_to_end(time.monotonic())
        assert run.succeeded(), run.output
        return _compared(run.output, want, processes)
    finally:
        run.kill()


def _compared(output, want, processes=COUNT):
    """Compares the losses of each process with the last ones of another run."""
    found = losses(output)
    assert len(found) == processes, output
    worst = 0.0
    for count, values in found:
        assert count == COUNT and len(values) <= len(want), (found, want)
        for value, other in zip(values, want[-len(values) :]):
            worst = max(worst, abs(value - other) / abs(other))
    assert worst < 1e-5, (found, want)
    return f"same losses ({worst:.0e})"


def check_killed(engine, backend, folder):
    """One process is killed: all end, and the engine names it."""
    victim = COUNT // 2
    run = start(engine, backend, folder, "--epochs", 10**6)
    try:
        run.wait_for("Epoch 3/")
        number = run.process_of(INDEX[engine], victim)
        began = time.monotonic()
        os.kill(number, signal.SIGKILL)
        seconds = run.seconds_to_end(began)
        assert not run.succeeded()
    finally:
        run.kill()
    (named,) = re.findall(NAMES[engine].format(victim), run.output)[:1] or [""]
    assert named, run.output
    limit = UNAIDED_S if engine == "k8s" else END_S
    assert seconds < limit, (seconds, run.output)
    return f"all ended in {seconds:.1f} s: {named!r}"


def check_unaided(engine, backend, folder):
    """SLURM lets the other tasks go on: they name the one that was killed."""
    victim = COUNT // 2
    command = ["srun", "--nodes", "2", "--ntasks", str(COUNT)]
    command += ["python", SCRIPT, "--epochs", "1000000", "--backup", folder]
    run = Run(command, folder, backend)
    try:
        run.wait_for("Epoch 3/")
        began = time.monotonic()
        os.kill(run.process_of(INDEX[engine], victim), signal.SIGKILL)
        seconds = run.seconds_to_end(began)
        assert not run.succeeded()
    finally:
        run.kill()
    named = re.findall(
        rf"Process {victim} has ended|process\(es\) \[{victim}\]", run.output
    )
    assert named, run.output
    assert seconds < UNAIDED_S, (seconds, run.output)
    return f"all ended in {seconds:.1f} s: {named[0]!r}"


def check_cancelled(engine, backend, folder):
    """The engine's own way to end a run ends all processes."""
    run = start(engine, backend, folder, "--epochs", 10**6)
    try:
        run.wait_for("Epoch 3/")
        began = time.monotonic()
        run.cancel()
        seconds = run.seconds_to_end(began)
        assert not run.succeeded()
    finally:
        run.kill()
    assert seconds < END_S, (seconds, run.output)
    return f"all ended in {seconds:.1f} s"


def check_requeued(engine, backend, folder):
    """A job that starts again goes on from its backup."""

    def requeue(run):
        # It makes no more progress.
        run.send(signal.SIGSTOP)
        said("scontrol", "requeue", run.number)
        deadline = time.monotonic() + START_S
        while run.state() != "PENDING":
            assert time.monotonic() < deadline, run.state()
            time.sleep(0.05)
        # Otherwise SLURM may wait before it starts the job again.
        said("scontrol", "update", f"JobId={run.number}", "StartTime=now")

    return _resumed(engine, backend, folder, requeue)


def check_restarted(engine, backend, folder):
    """The engine starts all again after a kill: they go on from the backup."""

    def kill_one(run):
        # The others make no more progress.
        os.kill(run.process_of(INDEX[engine], COUNT // 2), signal.SIGKILL)

    return _resumed(engine, backend, folder, kill_one, restarts=1)


def _resumed(engine, backend, folder, interrupt, restarts=0):
    """Interrupts a run; compares its losses after it has started again."""
    epochs = 12
    want = one_process(backend, epochs)
    run = start(engine, backend, folder, "--epochs", epochs, restarts=restarts)
    try:
        run.wait_for("Epoch 5/")
        interrupt(run)
        run.seconds_to_end(time.monotonic())
        assert run.succeeded(), run.output
        assert run.output.count("Epoch 1/") == 1, run.output
        return "resumed, " + _compared(run.output, want)
    finally:
        run.kill()


def manifests(backend, folder):
    """Returns the service and the job of Kubernetes that are printed."""
    arguments = ("--epochs", 3, "--backup", folder)
    return json.loads(printed("k8s", backend, COUNT, *arguments))["items"]


def check_valid(engine, backend, folder):
    """The manifests are those that Kubernetes takes."""
    # From the package index: schemas of Kubernetes.
    validate = importlib.import_module("kubernetes_validate").validate
    for item in manifests(backend, folder):
        validate(item, KUBERNETES, strict=True)
    return f"valid for Kubernetes {KUBERNETES}"


def check_absent(engine, backend, folder):
    """A part of the run does not come: somebody says so, and all end."""
    began = time.monotonic()
    run, words = ABSENT[engine](backend, folder)
    try:
        seconds = run.seconds_to_end(began)
        assert not run.succeeded(), run.output
    finally:
        run.kill()
    (said_so, *_) = re.findall(words, run.output) or [""]
    assert said_so, run.output
    return f"after {seconds:.0f} s: {said_so!r}"


def _absent_host(backend, folder):
    command = ["mpirun", "-n", "2", "--host", "localhost,host.invalid"]
    words = r"ORTE was unable to reliably start one or more daemons|ssh: .*"
    return Run([*command, "python", SCRIPT], folder, backend), words


def _absent_node(backend, folder):
    said("scontrol", "update", "NodeName=node2", "State=DOWN", "Reason=check")
    command = ["srun", "--nodes", "2", "--immediate=10", "python", SCRIPT]
    words = r"srun: error: Unable to allocate resources: .*"
    return SlurmWithoutNode(command, folder, backend), words


class SlurmWithoutNode(Run):
    """A run that waits for a node that is down; the node comes back later."""

    def kill(self):
        super().kill()
        said("scontrol", "update", "NodeName=node2", "State=RESUME")


def _absent_cpus(backend, folder):
    words = r"Ray has started \d+ of \d+ processes within 60 seconds"
    return start_printed("ray", backend, folder, 2 * COUNT), words


def _absent_pod(backend, folder):
    items = manifests(backend, folder)
    words = rf"Process\(es\) \[{COUNT - 1}\] .* within \d+ seconds"
    return Pods(items, folder, backend, missing=1), words


def _absent_agent(backend, folder):
    (port,) = supervisor.free_ports(1)
    command = [sys.executable, "-m", "torch.distributed.run"]
    command += ["--nnodes", "2", "--nproc-per-node", "1"]
    command += ["--rdzv-backend", "c10d", "--rdzv-conf", "join_timeout=10"]
    command += ["--rdzv-endpoint", f"127.0.0.1:{port}", SCRIPT]
    return Run(command, folder, backend), "RendezvousTimeoutError"


# A function for each engine that starts a run of which a part is missing.
ABSENT = {
    "openmpi": _absent_host,
    "slurm": _absent_node,
    "ray": _absent_cpus,
    "k8s": _absent_pod,
    "torchrun": _absent_agent,
}
# A pattern of what each engine says about a process that was killed.
NAMES = {
    "openmpi": r"process rank {} with PID .* exited on signal 9 \(Killed\)",
    "slurm": r"error: .*: task {}: Killed",
    "ray": r"First error, process {} of \d: The actor died",
    # It does not say before which process has which rank.
    "ray train": r"\[Rank \d Error Snippet\]:\nA worker health check failed",
    "torchrun": r"failed \(exitcode: -9\) local_rank: {}",
    # Kubernetes ends the other pods. Without it they do so.
    "k8s": r"Process {0} has ended|process\(es\) \[{0}\]",
}
CHECKS = {
    "openmpi": {
        "losses": check_losses,
        "printed": check_printed,
        "killed": check_killed,
        "cancelled": check_cancelled,
        "absent": check_absent,
    },
    "ray": {
        "losses": check_losses,
        "killed": check_killed,
        "cancelled": check_cancelled,
        "restarted": check_restarted,
        "absent": check_absent,
    },
    "ray train": {
        "losses": check_losses,
        "killed": check_killed,
        "restarted": check_restarted,
    },
    "torchrun": {
        "losses": check_losses,
        "killed": check_killed,
        "cancelled": check_cancelled,
        "restarted": check_restarted,
        "absent": check_absent,
    },
    "k8s": {
        "valid": check_valid,
        "losses": check_losses,
        "killed": check_killed,
        "absent": check_absent,
    },
    "slurm": {
        "losses": check_losses,
        "printed": check_printed,
        "killed": check_killed,
        "unaided": check_unaided,
        "cancelled": check_cancelled,
        "requeued": check_requeued,
        "absent": check_absent,
    },
}


def main(engine, *backends):
    """Makes the checks; returns the exit code."""
    wanted = os.environ.get("KERAS_TP_ENGINE_CHECKS", "").split()
    failed = False
    print(f"| engine, {COUNT} processes | backend | check | result |")
    print("|---|---|---|---|", flush=True)
    for backend in backends or BACKENDS:
        for name, check in CHECKS[engine].items():
            if wanted and name not in wanted:
                continue
            with tempfile.TemporaryDirectory(prefix="keras_tp_") as folder:
                try:
                    result = check(engine, backend, pathlib.Path(folder, name))
                except (AssertionError, subprocess.SubprocessError) as e:
                    failed = True
                    result = "FAILED"
                    print(e, file=sys.stderr)
            print(f"| {engine} | {backend} | {name} | {result} |", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
