"""The commands with which other engines start the processes of a run."""

import json
import shlex
import sys

import keras

from keras_tp.backend.processes import supervisor

_PORT = 9000
_NAME = "train"
# Kubernetes gives each pod of an indexed job its index here.
_INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"


def show(plan, argv, environment=None):
    """Prints the command of `plan.engine` for a run.

    Args:
        plan: `supervisor.Plan`. If it has hosts, the command names them.
        argv: List of strings. The script and its arguments. The script has to
            call `distribution.initialize`.
        environment: Function of the number of devices of a process. It returns
            the environment variables with which the backend makes virtual
            devices. Defaults to `None`: a process has one device.
    """
    variables = {"KERAS_BACKEND": keras.config.backend()}
    count = plan.devices // plan.processes
    if count > 1:
        variables.update(environment(count))
    found = _COMMANDS[plan.engine](plan, ["python", *argv], variables)
    sys.stdout.write(found + "\n")


def _slurm(plan, argv, variables):
    told = [f"{name}={shlex.quote(v)}" for name, v in variables.items()]
    options = ["--ntasks", str(plan.processes)]
    if plan.hosts:
        names = [host.rpartition(":")[0] for host in plan.hosts]
        options += ["--ntasks-per-node", str(plan.processes_here)]
        options += ["--nodelist", ",".join(names)]
    options += ["--distribution", "block", "--kill-on-bad-exit=1"]
    return " ".join([*told, shlex.join(["srun", *options, *argv])])


def _mpi(plan, argv, variables):
    options = ["-n", str(plan.processes)]
    if plan.hosts:
        names = [host.rpartition(":")[0] for host in plan.hosts]
        slots = [f"{name}:{plan.processes_here}" for name in names]
        options += ["--host", ",".join(slots)]
        addresses = ",".join(plan.addresses())
        variables = {**variables, supervisor.ADDRESSES: addresses}
    for name, value in variables.items():
        options += ["-x", f"{name}={value}"]
    if plan.hosts:
        # From the environment of mpirun.
        options += ["-x", "KERAS_TP_SECRET"]
    return shlex.join(["mpirun", *options, *argv])


def _kubernetes(plan, argv, variables):
    addresses = ",".join(
        f"{_NAME}-{index}.{_NAME}:{_PORT}" for index in range(plan.processes)
    )
    told = {
        **variables,
        supervisor.ADDRESSES: addresses,
        supervisor.COUNT: str(plan.processes),
    }
    secret = {"name": _NAME, "key": "secret"}
    environment = [
        *({"name": name, "value": value} for name, value in told.items()),
        {
            "name": supervisor.INDEX,
            "valueFrom": {"fieldRef": {"fieldPath": _INDEX}},
        },
        {"name": "KERAS_TP_SECRET", "valueFrom": {"secretKeyRef": secret}},
    ]
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": _NAME},
        # Names of pods have an address before their pods are ready.
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {"job-name": _NAME},
        },
    }
    container = {
        "name": _NAME,
        "image": "IMAGE",
        "command": argv,
        "env": environment,
    }
    job = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": _NAME},
        "spec": {
            "completionMode": "Indexed",
            "completions": plan.processes,
            "parallelism": plan.processes,
            "backoffLimit": 0,
            "template": {
                "spec": {
                    "subdomain": _NAME,
                    "restartPolicy": "Never",
                    "containers": [container],
                }
            },
        },
    }
    both = {"apiVersion": "v1", "kind": "List", "items": [service, job]}
    return json.dumps(both, indent=2)


_PROGRAM = '''\
"""Runs a script in several processes of a Ray cluster."""

import os
import runpy
import secrets
import socket
import sys

import ray

ARGUMENTS = {argv!r}
VARIABLES = {variables!r}
COUNT = {count}
# How often all processes start again after an error. A script that saves with
# `keras.callbacks.BackupAndRestore` goes on where it was.
RESTARTS = int(os.environ.get("KERAS_TP_RESTARTS", "0"))


# On accelerators: `@ray.remote(num_gpus={devices})`.
@ray.remote(num_cpus=1)
class Process:
    def address(self):
        with socket.create_server(("", 0)) as server:
            port = server.getsockname()[1]
        return f"{{ray.util.get_node_ip_address()}}:{{port}}"

    def run(self, addresses):
        os.environ["{addresses}"] = addresses
        sys.argv = ARGUMENTS
        sys.path.insert(0, os.path.dirname(os.path.abspath(ARGUMENTS[0])))
        runpy.run_path(ARGUMENTS[0], run_name="__main__")


def start():
    """Starts all processes; returns them, and the addresses of all."""
    processes = []
    for index in range(COUNT):
        variables = {{**VARIABLES, "{index_name}": str(index)}}
        options = dict(
            name=f"process {{index}}", runtime_env=dict(env_vars=variables)
        )
        processes.append(Process.options(**options).remote())
    started = [process.address.remote() for process in processes]
    ready, missing = ray.wait(started, num_returns=COUNT, timeout=60)
    if missing:
        sys.exit(
            f"Ray has started {{len(ready)}} of {{COUNT}} processes within 60 "
            "seconds. Each needs what `@ray.remote` says. The cluster has: "
            f"{{ray.cluster_resources()}}"
        )
    return processes, ",".join(ray.get(started))


def first_error(processes, addresses):
    """Runs the script in all; returns an index and its error, or `None`."""
    left = [process.run.remote(addresses) for process in processes]
    indices = dict((result, index) for index, result in enumerate(left))
    errors = []
    while left:
        # After an error, the others have a few seconds to tell theirs.
        done, left = ray.wait(left, timeout=5 if errors else None)
        if not done:
            break
        try:
            ray.get(done)
        except ray.exceptions.RayError as e:
            errors.append((indices[done[0]], e))
    # A process that died is the cause of the errors of others.
    died = ray.exceptions.ActorDiedError
    errors.sort(key=lambda pair: not isinstance(pair[1], died))
    return errors[0] if errors else None


ray.init()
VARIABLES["{count_name}"] = str(COUNT)
VARIABLES["KERAS_TP_SECRET"] = secrets.token_hex(16)
for restarts_left in range(RESTARTS, -1, -1):
    processes, addresses = start()
    error = first_error(processes, addresses)
    for process in processes:
        ray.kill(process)
    if error is None:
        break
    print("First error, process {{}} of {count}: {{}}".format(*error))
    print(f"Restarts that are left: {{restarts_left}}", flush=True)
else:
    sys.exit(1)'''


def _ray(plan, argv, variables):
    return _PROGRAM.format(
        argv=argv[1:],
        variables=variables,
        count=plan.processes,
        devices=plan.devices // plan.processes,
        addresses=supervisor.ADDRESSES,
        count_name=supervisor.COUNT,
        index_name=supervisor.INDEX,
    )


_COMMANDS = {"slurm": _slurm, "mpi": _mpi, "k8s": _kubernetes, "ray": _ray}
ENGINES = tuple(_COMMANDS)
