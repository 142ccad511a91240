"""Several processes: the shared tests in each of them, and how runs end.

One launch runs many tests. KERAS_TP_TORCH_DEVICES=4 runs them on four.
"""

import concurrent.futures
import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import keras
import pytest

from integration_tests import launching

ROOT = pathlib.Path(__file__).parent.parent
HERE = pathlib.Path(__file__).parent
DEVICES = int(os.environ.get("KERAS_TP_TORCH_DEVICES", "2"))
RANKS = str(HERE / "torch_ranks.py")
ENDS_SCRIPT = str(HERE / "processes_ends.py")

pytestmark = pytest.mark.skipif(
    keras.config.backend() != "torch" or "RANK" in os.environ,
    reason="launches processes of torch",
)


def launch(
    *arguments,
    devices=DEVICES,
    timeout=600,
    capture_output=True,
    **environment,
):
    """Runs a script in several processes, and returns how it ended."""
    env = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        **environment,
    }
    return subprocess.run(
        [
            *(sys.executable, "-m", "keras_tp.launch"),
            *("--devices", str(devices), *arguments),
        ],
        cwd=ROOT,
        env=env,
        capture_output=capture_output,
        text=True,
        timeout=timeout,
    )


def test_shared_tests_in_every_process(tmp_path, capfd):
    """All of `torch_ranks.SHARED` in one run, whose own report is shown."""
    with capfd.disabled():
        print()
        result = launch(
            RANKS,
            timeout=3600,
            capture_output=False,
            KERAS_TP_RANK_FOLDER=str(tmp_path),
            # Beside other tests, compilers take long in one of them.
            KERAS_TP_TIMEOUT="300",
        )
    failures = [
        path.read_text()[-3000:]
        for name in ("failed", "rank")
        for path in sorted(tmp_path.glob(f"{name}_*.txt"))
    ]
    assert result.returncode == 0, "\n".join(failures)


def test_memory_at_build(tmp_path):
    """A process never holds more than its share and one whole variable."""
    result = launch(
        str(HERE / "torch_memory.py"),
        str(tmp_path),
        # Freed memory goes back at once: what is used is what is held.
        MALLOC_MMAP_THRESHOLD_="65536",
        MALLOC_TRIM_THRESHOLD_="65536",
    )
    assert result.returncode == 0, result.stderr[-3000:]
    for index in range(DEVICES):
        found = json.loads((tmp_path / f"{index}.json").read_text())
        split, slots = found["split"]["weight"], found["split"]["slot"]
        assert split >= 256 * 2**20
        assert slots == 2 * split
        # To the byte.
        for role, size in found["split"].items():
            assert size % DEVICES == 0
            assert set(found["held"][role].values()) == {size // DEVICES}
        assert len(found["held"]["weight"]) == DEVICES
        share = split // DEVICES
        assert found["largest"] == 32 * 2**20
        # A share has to be there, or nothing was measured.
        assert share <= found["built"]["peak"], found
        assert found["built"]["peak"] <= 1.25 * share + found["largest"], found
        # Slots are never whole.
        assert found["slots"]["peak"] <= 3.25 * share + found["largest"], found


def test_memory_of_a_fully_sharded_training(tmp_path):
    """A process holds its share, and one gathered kernel with its gradient."""
    result = launch(
        str(HERE / "torch_memory.py"),
        str(tmp_path),
        "fully_sharded",
        MALLOC_MMAP_THRESHOLD_="65536",
        MALLOC_TRIM_THRESHOLD_="65536",
    )
    assert result.returncode == 0, result.stderr[-3000:]
    for index in range(DEVICES):
        found = json.loads((tmp_path / f"{index}.json").read_text())
        planned = found["planned"]
        assert planned["parameters"] >= 256 * 2**20 // DEVICES
        assert planned["gathered"] == 64 * 2**20
        assert found["peak"] == pytest.approx(planned["total"], rel=0.1), found


SCRIPT = """
import os, pathlib, sys, time
import keras, numpy as np, torch
from keras import layers
from keras_tp import distribution as dist

began = pathlib.Path(__file__).with_suffix(".began")
# The time that counts begins when everything is imported.
began.touch()
report = sys.excepthook


def excepthook(*error):
    found = began.with_suffix(".error")
    if not found.exists():
        found.touch()
    report(*error)


sys.excepthook = excepthook
what, rank = sys.argv[1], int(os.environ.get("RANK", 0))
if what == "seed":
    keras.utils.set_random_seed(rank)
count = int(os.environ.get("WORLD_SIZE", 1))
if what == "no_launcher":
    count = 2
mesh = dist.DeviceMesh((1, count), ["batch", "model"])
layout_map = dist.LayoutMap(mesh)
layout_map[".*up/kernel"] = (None, "model")
layout_map[".*down/kernel"] = ("model", None)
dist.set_distribution(dist.ModelParallel(layout_map=layout_map))
model = keras.Sequential(
    [
        layers.Input((16,)),
        layers.Dense(32, activation="relu", name="up"),
        layers.Dense(16, name="down"),
    ]
)
model.compile("sgd", "mse")
x = np.ones((32, 16), "float32")
if what == "batch":
    x = x + rank
model.fit(x, x, verbose=2 if what == "verbose" else 0)
# The error is still to come.
began.touch()
if what == "random" and rank == 1:
    torch.randn(3)
if what == "save" and rank == 0:
    model.save(sys.argv[2])
if what == "weights" and rank == 0:
    model.get_weights()
if what == "raise" and rank == 1:
    raise ValueError("the first error")
if what == "kill" and rank == 1:
    os.kill(os.getpid(), 9)
model.fit(x, x, verbose=0, epochs=1000 if what in ("kill", "raise") else 2)
"""

# What happens -> what has to stand in the output.
ENDS = {
    # These wait for a process that does not come, 45 s by default.
    "save": ["every process has to call it", "Missing: process(es) [1]."],
    "weights": ["every process has to call it", "Missing: process(es) [1]."],
    "seed": ["given different seeds", "{0: 0, 1: 1}"],
    "batch": ["hold different batches"],
    "random": ["hold different random states"],
    "raise": ["ValueError: the first error"],
    "kill": ["First error, process 1 of 2", "SIGKILL"],
}


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "keras_tp_script_of_a_test.py"
    path.write_text(SCRIPT)
    return str(path)


@pytest.fixture(scope="module")
def ends(tmp_path_factory):
    """How runs end, by what happens: `(script, result, seconds)`, or soon.

    Seconds are those until a process has an error, and from then to the end.

    Most of the time they wait for a process that does not come, so some of
    them run at once.
    """

    def end(what):
        folder = tmp_path_factory.mktemp(what)
        script = folder / "keras_tp_script_of_a_test.py"
        script.write_text(SCRIPT)
        result = launch(
            str(script),
            what,
            str(folder / "m.keras"),
            devices=2,
            timeout=150,
            # One test waits as long as users do.
            **({"KERAS_TP_TIMEOUT": "20"} if what == "weights" else {}),
        )
        ended = time.time()
        began = script.with_suffix(".began").stat().st_mtime
        error = script.with_suffix(".error")
        # A process that is killed has none.
        found = error.stat().st_mtime if error.exists() else began
        return str(script), result, (found - began, ended - found)

    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        yield {what: pool.submit(end, what) for what in ENDS}


@pytest.mark.parametrize("what", ENDS)
def test_an_error_ends_all_processes_in_time(what, ends):
    script, result, seconds = ends[what].result()
    assert result.returncode != 0
    output = result.stdout + result.stderr
    for text in ENDS[what]:
        assert text in output, output[-4000:]
    to_error, to_end = seconds
    assert to_error < 60
    assert to_end < 30
    assert not launching.running(script)
    last = launching.last_report(result.stderr)
    assert last.startswith("First error"), last
    if what == "raise":
        # Below what it does to the other process.
        assert last.startswith("First error, process 1 of 2:\nTraceback")
        assert last.endswith("ValueError: the first error\n")
    if what == "kill":
        assert "process 1 of 2:\nIt was ended by SIGKILL.\n" in last


def test_the_others_wait_for_the_one_that_writes(tmp_path):
    """A large file takes longer than processes wait for each other else."""
    result = launch(
        *(ENDS_SCRIPT, "slow_saving", str(tmp_path)),
        devices=2,
        timeout=150,
        KERAS_TP_TIMEOUT="20",
    )
    assert result.returncode == 0, result.stderr[-4000:]
    assert launching.arrays_of(tmp_path / "model.keras")
    assert not list(tmp_path.glob(".*.keras"))


@pytest.mark.parametrize("index", [0, 1])
def test_a_process_that_dies_while_it_saves(index, tmp_path):
    what = f"kill_saving{index}"
    result = launch(ENDS_SCRIPT, what, str(tmp_path), devices=2, timeout=150)
    ended = time.time()
    assert result.returncode != 0
    assert launching.last_report(result.stderr).startswith(
        f"First error, process {index} of 2:\nIt was ended by SIGKILL.\n"
    ), result.stderr[-4000:]
    assert ended - (tmp_path / "began").stat().st_mtime < 60
    assert not launching.running(str(tmp_path))
    # The file is the one that was complete.
    launching.assert_holds(tmp_path / "model.keras", tmp_path / "saved.npz")


def test_a_process_that_dies_while_it_starts(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(launching.KILL_AT_START)
    began = time.time()
    result = launch(
        *(ENDS_SCRIPT, "nothing", str(tmp_path)),
        devices=2,
        PYTHONPATH=f"{tmp_path}{os.pathsep}{ROOT}",
    )
    assert result.returncode != 0
    assert launching.last_report(result.stderr).startswith(
        "First error, process 1 of 2:\nIt was ended by SIGKILL.\n"
    ), result.stderr[-4000:]
    assert time.time() - began < 60
    assert not (tmp_path / "began").exists()
    assert not launching.running(str(tmp_path))


def test_one_process_prints(script):
    result = launch(script, "verbose", devices=2)
    assert result.returncode == 0, result.stderr[-3000:]
    assert result.stdout.count("loss:") == 1, result.stdout


def test_without_a_launcher_the_command_is_in_the_error(script):
    result = subprocess.run(
        [sys.executable, script, "no_launcher"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode != 0
    assert f"python -m keras_tp.launch --devices 2 {script}" in result.stderr
    assert f"torchrun --nproc-per-node 2 {script}" in result.stderr


def test_without_a_launcher_one_device_works(script):
    result = subprocess.run(
        [sys.executable, script, "plain"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr[-3000:]


COME = {
    "torch": {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "{port}",
        "WORLD_SIZE": "3",
        "RANK": "{index}",
    },
    "keras": {
        "KERAS_DISTRIBUTION_JOB_ADDRESSES": "127.0.0.1:{port}",
        "KERAS_DISTRIBUTION_NUM_PROCESSES": "3",
        "KERAS_DISTRIBUTION_PROCESS_ID": "{index}",
    },
}


@pytest.mark.parametrize("variables", COME)
def test_a_process_that_does_not_come_is_named(variables):
    port = launching.free_port()
    children = []
    for index in (0, 2):
        told = {
            name: value.format(port=port, index=index)
            for name, value in COME[variables].items()
        }
        children.append(
            subprocess.Popen(
                [
                    *(sys.executable, "-c"),
                    "from keras_tp import distribution as dist\n"
                    "dist.initialize()",
                ],
                env={
                    **os.environ,
                    **told,
                    "PYTHONPATH": str(ROOT),
                    "KERAS_TP_TIMEOUT": "15",
                },
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    try:
        errors = [child.communicate(timeout=100)[1] for child in children]
    finally:
        for child in children:
            child.kill()
    for child, error in zip(children, errors):
        assert child.returncode != 0
        assert "Process(es) [1] of 3 did not start within 15 seconds" in error


def test_two_agents_on_one_host(script):
    """Plain torchrun, as on two hosts with one process each."""
    command = [
        *(sys.executable, "-m", "torch.distributed.run"),
        *("--nnodes=2", "--nproc-per-node=1"),
        *("--rdzv-backend=static", "--master-addr=127.0.0.1"),
        "--master-port=29613",
    ]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    agents = [
        subprocess.Popen(
            [*command, f"--node-rank={index}", script, "verbose"],
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        for index in range(2)
    ]
    try:
        outputs = [agent.communicate(timeout=150) for agent in agents]
    finally:
        for agent in agents:
            if agent.poll() is None:
                os.killpg(agent.pid, signal.SIGKILL)
    for agent, (_, errors) in zip(agents, outputs):
        assert agent.returncode == 0, errors[-3000:]
    printed = [output.count("loss:") for output, _ in outputs]
    assert sorted(printed) == [0, 1]
