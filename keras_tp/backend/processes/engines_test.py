import itertools
import os
import shutil
import subprocess
import sys

import keras
import pytest

from keras_tp import backend
from keras_tp import distribution as dist
from keras_tp.backend.processes import engines

MPI = {
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_RANK": "2",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "2",
    "OMPI_MCA_orte_hnp_uri": "446103552.0;tcp://192.0.2.2:48713",
    "PMIX_NAMESPACE": "446103553",
}
SLURM = {
    "SLURM_JOB_ID": "17",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "node[1-2]",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "2",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "1",
}


@pytest.fixture
def told(monkeypatch):
    """Returns a function that sets the variables of an engine."""
    for name in {*MPI, *SLURM}:
        monkeypatch.delenv(name, raising=False)

    def tell(variables, **others):
        for name, value in {**variables, **others}.items():
            if value is None:
                monkeypatch.delenv(name, raising=False)
            else:
                monkeypatch.setenv(name, value)

    return tell


def hosts_and_ports(addresses):
    pairs = [address.rpartition(":") for address in addresses.split(",")]
    return [pair[0] for pair in pairs], [int(pair[2]) for pair in pairs]


def test_no_engine(told):
    assert engines.find() is None
    assert engines.fill(None, None, None) == (None, None, None)
    # In a batch script, which is one process.
    told(SLURM, SLURM_STEP_NODELIST=None)
    assert engines.find() is None


@pytest.mark.parametrize("version", [4, 5])
def test_open_mpi_on_one_host(version, told):
    told(MPI)
    if version == 5:
        told({}, OMPI_MCA_orte_hnp_uri=None, PMIX_NAMESPACE="prterun-vm-30@1")
    addresses, count, index = engines.fill(None, None, None)
    assert (count, index) == (4, 2)
    hosts, ports = hosts_and_ports(addresses)
    assert hosts == ["127.0.0.1"] * 4
    assert ports == list(range(ports[0], ports[0] + 4))
    # The other processes find the same, and another run other ports.
    told({}, OMPI_COMM_WORLD_RANK="0", OMPI_COMM_WORLD_LOCAL_RANK="0")
    assert engines.fill(None, None, None) == (addresses, 4, 0)
    name = "OMPI_MCA_orte_hnp_uri" if version == 4 else "PMIX_NAMESPACE"
    told({}, **{name: "another"})
    others = hosts_and_ports(engines.fill(None, None, None)[0])[1]
    assert not set(ports) & set(others)


def test_open_mpi_on_several_hosts(told):
    told(MPI, OMPI_COMM_WORLD_LOCAL_SIZE="2")
    with pytest.raises(ValueError, match="KERAS_DISTRIBUTION_JOB_ADDRESSES"):
        engines.fill(None, None, None)
    assert engines.fill("a:1,b:2", None, None) == ("a:1,b:2", 4, 2)


def test_what_is_given_wins(told):
    told(MPI)
    assert engines.fill("a:1", 2, 0) == ("a:1", 2, 0)
    assert engines.fill(None, 1, 0) == (None, 1, 0)
    told({}, OMPI_COMM_WORLD_SIZE="1", OMPI_COMM_WORLD_RANK="0")
    assert engines.fill(None, None, None) == (None, None, None)


def test_slurm(told):
    told(SLURM)
    assert engines.find().local_index == 0
    addresses, count, index = engines.fill(None, None, None)
    assert (count, index) == (4, 2)
    hosts, ports = hosts_and_ports(addresses)
    assert hosts == ["node1", "node1", "node2", "node2"]
    assert ports == list(range(ports[0], ports[0] + 4))
    # Steps of a job may run at the same time.
    told({}, SLURM_STEP_ID="1")
    others = hosts_and_ports(engines.fill(None, None, None)[0])[1]
    assert not set(ports) & set(others)


def test_slurm_on_one_node(told):
    told(SLURM, SLURM_STEP_NODELIST="node7", SLURM_STEP_TASKS_PER_NODE="4")
    told({}, SLURM_NODEID="0")
    hosts, _ = hosts_and_ports(engines.fill(None, None, None)[0])
    assert hosts == ["127.0.0.1"] * 4


@pytest.mark.parametrize(
    "variables",
    [
        # Task 2 of a cyclic distribution is on the first node.
        {"SLURM_NODEID": "0"},
        {"SLURM_STEP_TASKS_PER_NODE": "2"},
        {"SLURM_NODEID": None},
    ],
)
def test_slurm_with_tasks_elsewhere(variables, told):
    told(SLURM, **variables)
    with pytest.raises(ValueError, match="srun --distribution=block"):
        engines.fill(None, None, None)
    assert engines.fill("a:1", None, None) == ("a:1", 4, 2)


NODES = {
    "node7": ["node7"],
    "a,b": ["a", "b"],
    "node[1-2,07]": ["node1", "node2", "node07"],
    "r[08-10],x,c[1,3]": ["r08", "r09", "r10", "x", "c1", "c3"],
    "r[1-2]n[3-4]": ["r1n3", "r1n4", "r2n3", "r2n4"],
    "127.0.0.1": ["127.0.0.1"],
}


@pytest.mark.parametrize("nodes", NODES)
def test_lists_of_nodes(nodes):
    assert engines.expand_nodes(nodes) == NODES[nodes]


@pytest.mark.skipif(not shutil.which("scontrol"), reason="needs SLURM")
@pytest.mark.parametrize("nodes", NODES)
def test_lists_of_nodes_are_those_of_slurm(nodes, tmp_path):
    # It asks no daemon, but reads the file.
    (tmp_path / "slurm.conf").write_text(
        "ClusterName=test\nSlurmctldHost=localhost\nNodeName=localhost\n"
    )
    result = subprocess.run(
        ["scontrol", "show", "hostnames", nodes],
        env={**os.environ, "SLURM_CONF": str(tmp_path / "slurm.conf")},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == NODES[nodes]


def test_ports_of_runs_are_apart(told):
    """Of two runs with the same number of processes, all ports differ or none.

    All are among those that no outgoing connection is given.
    """
    seen = []
    for job in range(200):
        told(SLURM, SLURM_JOB_ID=str(job))
        seen.append(hosts_and_ports(engines.fill(None, None, None)[0])[1])
    assert all(14999 < port < 32000 for ports in seen for port in ports)
    for one, other in itertools.combinations(seen, 2):
        assert one == other or not set(one) & set(other)
    assert len(set(map(tuple, seen))) > 190


@pytest.fixture
def started(told, monkeypatch):
    """Returns a list with the arguments of each `processes.start`."""
    for name in ("RANK", "WORLD_SIZE", "DTENSOR_JOBS"):
        monkeypatch.delenv(name, raising=False)
    calls = []
    lib = sys.modules[backend.distribution_lib.initialize.__module__]
    monkeypatch.setattr(lib.processes, "start", lambda *a: calls.append(a))
    return calls


needs_no_own_detection = pytest.mark.skipif(
    keras.config.backend() == "jax", reason="JAX detects engines by itself"
)


@needs_no_own_detection
@pytest.mark.parametrize("variables", [MPI, SLURM], ids=["mpi", "slurm"])
def test_initialize_reads_the_variables_of_an_engine(variables, told, started):
    told(variables)
    addresses, _, _ = engines.fill(None, None, None)
    dist.initialize()
    if keras.config.backend() == "torch":
        addresses = "tcp://" + addresses.split(",")[0]
    assert started == [(addresses, 4, 2)]


@needs_no_own_detection
def test_variables_of_the_framework_win(told, started):
    told(MPI, RANK="0", WORLD_SIZE="2", DTENSOR_JOBS="a:1,b:2")
    dist.initialize()
    nothing = () if keras.config.backend() == "torch" else (None, None, None)
    assert started == [nothing]


@needs_no_own_detection
def test_variables_of_keras_win(told, started):
    told(
        MPI,
        KERAS_DISTRIBUTION_JOB_ADDRESSES="a:1,b:2",
        KERAS_DISTRIBUTION_NUM_PROCESSES="2",
        KERAS_DISTRIBUTION_PROCESS_ID="1",
    )
    dist.initialize()
    address = "tcp://a:1" if keras.config.backend() == "torch" else "a:1,b:2"
    assert started == [(address, 2, 1)]


@pytest.mark.skipif(keras.config.backend() != "jax", reason="JAX only")
def test_jax_joins_the_processes_of_open_mpi_5(told, monkeypatch):
    class Met(BaseException):
        pass

    def meet(*found):
        raise Met(*found)

    told(MPI, OMPI_MCA_orte_hnp_uri=None)
    lib = sys.modules[backend.distribution_lib.initialize.__module__]
    monkeypatch.setattr(lib.processes.rendezvous, "meet", meet)
    first = engines.fill(None, None, None)[0].split(",")[0]
    with pytest.raises(Met) as error:
        dist.initialize()
    assert error.value.args[:3] == (first, 4, 2)


@pytest.mark.skipif(keras.config.backend() != "torch", reason="torch only")
def test_a_process_takes_the_device_that_the_engine_gives(told, monkeypatch):
    import torch

    lib = sys.modules[backend.distribution_lib.initialize.__module__]
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    for count, wanted in ((4, 1), (1, 0)):
        monkeypatch.setattr(torch.cuda, "device_count", lambda n=count: n)
        # Process 2 is the first of the second host, and 3 is the next.
        told(SLURM, SLURM_PROCID="3", SLURM_LOCALID="1")
        assert lib.processes._local_index(3) == wanted
