"""Reads the place of this process in a run that Open MPI or SLURM started.

Both set environment variables in each process: its index, their number, and
something that identifies the run. The processes of a run derive the same ports
from the latter. The names of Open MPI's variables are those of its mpirun(1),
of SLURM's those of srun(1), "OUTPUT ENVIRONMENT VARIABLES".
"""

import collections
import itertools
import os
import re
import zlib

from keras_tp.backend.processes.supervisor import ADDRESSES
from keras_tp.backend.processes.supervisor import PORTS

_LOOPBACK = "127.0.0.1"
_MPI = ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK")
# Set in the processes of a job step only, not in a batch script.
_SLURM = ("SLURM_STEP_NODELIST", "SLURM_NTASKS", "SLURM_PROCID")
# Set in Open MPI 4 only. JAX looks for it.
_MPI_URI = "OMPI_MCA_orte_hnp_uri"

# Without these a process is not part of an engine's run.
VARIABLES = (*_MPI, _MPI_URI, *_SLURM)


class Engine(
    collections.namedtuple(
        "Engine", "name command index count local_index run hosts"
    )
):
    """An engine that started this process, and the place of the process.

    Args:
        name: String, such as `"Open MPI"`.
        command: String, the command that starts processes.
        index: Int. Index of this process among all.
        count: Int. Number of processes of the run.
        local_index: Int. Index of this process on its host.
        run: String that identifies the run. It is equal in its processes.
        hosts: Function without arguments. It returns a list with the host of
            each process.
    """

    def addresses(self):
        """Returns the `host:port` of all processes, separated by commas."""
        hosts = self.hosts()
        last = len(PORTS) // self.count
        first = zlib.crc32(self.run.encode()) % last * self.count
        return ",".join(
            f"{host}:{PORTS[first + index]}" for index, host in enumerate(hosts)
        )


def find():
    """Returns the `Engine` that started this process, or `None`."""
    given = os.environ
    if all(name in given for name in _MPI):
        return _open_mpi(given)
    if all(name in given for name in _SLURM):
        return _slurm(given)
    return None


def fill(job_addresses, num_processes, process_id):
    """Returns the arguments of `initialize`, filled in by an engine.

    Arguments that are not `None` are kept. So are all if no engine started
    several processes.

    Raises:
        ValueError: if the engine does not say where the processes run.
    """
    engine = find()
    if engine is None or engine.count < 2:
        return job_addresses, num_processes, process_id
    if num_processes is None:
        num_processes = engine.count
    if process_id is None:
        process_id = engine.index
    if job_addresses is None and num_processes > 1:
        job_addresses = engine.addresses()
    return job_addresses, num_processes, process_id


def _open_mpi(given):
    """Returns Open MPI's `Engine`."""
    count, index = (int(given[name]) for name in _MPI)
    local_count = int(given.get("OMPI_COMM_WORLD_LOCAL_SIZE", 0))

    def hosts():
        if local_count == count:
            return [_LOOPBACK] * count
        raise ValueError(
            "Open MPI does not tell its processes on which hosts the others "
            "run. On several hosts, give all processes the addresses: `mpirun "
            f"-x {ADDRESSES}=host0:9000,host1:9000 ...`, the `host:port` of "
            "every process in the order of their indices. On torch that of "
            f"process 0 is enough. Received: OMPI_COMM_WORLD_SIZE={count}; "
            f"OMPI_COMM_WORLD_LOCAL_SIZE={local_count}"
        )

    uri = given.get(_MPI_URI, "").partition(".")[0]
    return Engine(
        "Open MPI",
        "mpirun",
        index,
        count,
        int(given.get("OMPI_COMM_WORLD_LOCAL_RANK", index)),
        uri or given.get("PMIX_NAMESPACE", ""),
        hosts,
    )


def _slurm(given):
    """Returns SLURM's `Engine`."""
    nodes, count, index = (given[name] for name in _SLURM)
    count, index = int(count), int(index)
    sizes = given.get("SLURM_STEP_TASKS_PER_NODE", "")

    def hosts():
        names = expand_nodes(nodes)
        if len(names) == 1:
            return [_LOOPBACK] * count
        found = [
            name
            for name, size in zip(names, _expand_sizes(sizes))
            for _ in range(size)
        ]
        own = given.get("SLURM_NODEID", "")
        if (
            len(found) != count
            or not own.isdigit()
            or found[index] != names[int(own)]
        ):
            raise ValueError(
                "The tasks of this job step are not on its nodes in blocks of "
                "consecutive indices, so their addresses are not known. Use "
                f"`srun --distribution=block`, or set {ADDRESSES} to the "
                "`host:port` of every process in the order of their indices. "
                f"Received: SLURM_STEP_NODELIST={nodes!r}; "
                f"SLURM_STEP_TASKS_PER_NODE={sizes!r}; SLURM_NODEID={own!r}; "
                f"SLURM_NTASKS={count}; SLURM_PROCID={index}"
            )
        return found

    job, step = (given.get(f"SLURM_{name}_ID", "") for name in ("JOB", "STEP"))
    return Engine(
        "SLURM",
        "srun",
        index,
        count,
        int(given.get("SLURM_LOCALID", index)),
        f"{job}.{step}",
        hosts,
    )


def expand_nodes(nodes):
    """Returns the names of a list of nodes, as `scontrol show hostnames`.

    Args:
        nodes: String, such as `"a[1-3,07],b"`.
    """
    found = []
    # Commas inside of brackets do not separate names.
    for name in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", nodes):
        parts = re.split(r"\[([^\]]*)\]", name)
        # Every second part was in brackets.
        choices = [
            _expand_range(part) if position % 2 else [part]
            for position, part in enumerate(parts)
        ]
        found += map("".join, itertools.product(*choices))
    return found


def _expand_range(text):
    """Returns `["1", "2", "07"]` for `"1-2,07"`."""
    found = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        numbers = range(int(first), int(last or first) + 1)
        found += [f"{number:0{len(first)}}" for number in numbers]
    return found


def _expand_sizes(text):
    """Returns `[2, 2, 1]` for `"2(x2),1"`."""
    found = []
    for size, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        found += [int(size)] * int(times or 1)
    return found
