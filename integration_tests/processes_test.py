"""Several processes, each with some of the devices, against one with all."""

import concurrent.futures
import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import keras
import numpy as np
import pytest

from integration_tests import launching
from integration_tests import processes_meshes

BACKEND = keras.config.backend()
ROOT = pathlib.Path(__file__).parent.parent
HERE = pathlib.Path(__file__).parent
SCRIPT = str(HERE / "processes_script.py")
ENDS_SCRIPT = str(HERE / "processes_ends.py")
MESHES = processes_meshes.NAMES
CHECKS = [
    *(f"training/{mesh}" for mesh in MESHES),
    *(f"own_parts/{mesh}" for mesh in MESHES if mesh != "1x4"),
    *("callbacks/2x2", "collectives/2x2", "kinds_of_data/2x2", "moving/2x2"),
    "reports/2x2",
]

pytestmark = pytest.mark.skipif(
    BACKEND not in ("jax", "tensorflow"),
    reason="on torch a process is a device: torch_processes_test.py",
)


def command(*arguments, devices=4, processes=2):
    return [
        *(sys.executable, "-m", "keras_tp.launch"),
        *("--devices", str(devices), "--processes", str(processes)),
        *map(str, arguments),
    ]


def launch(*arguments, processes=2, timeout=600, **variables):
    """Runs a script, and returns how it ended."""
    return subprocess.run(
        command(*arguments, processes=processes),
        env=launching.environment(**variables),
        capture_output=True,
        text=True,
        timeout=timeout,
    )


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """What the script found: in one process, and in each of two."""
    folders = {n: tmp_path_factory.mktemp(f"of_{n}") for n in (1, 2)}
    results = {}
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        for count, result in zip(
            folders,
            pool.map(
                lambda n: launch(SCRIPT, folders[n], processes=n), folders
            ),
        ):
            assert result.returncode == 0, result.stderr[-5000:]
            results[count] = result
    found = {
        (index, count): json.loads(
            (folders[count] / f"{index}_of_{count}.json").read_text()
        )
        for index, count in [(0, 1), (0, 2), (1, 2)]
    }
    return folders, results, found


@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize("check", CHECKS)
def test_two_processes_are_as_one(check, index, runs):
    _, _, found = runs
    one, two = found[0, 1][check], found[index, 2][check]
    assert one and one.keys() == two.keys()
    for name, value in one.items():
        value, other = np.array(value), np.array(two[name])
        assert np.isfinite(value).all()
        np.testing.assert_allclose(
            other, value, rtol=1e-5, atol=1e-6, err_msg=name
        )


@pytest.mark.parametrize("mesh", MESHES)
def test_files_are_those_of_one_process(mesh, runs):
    folders, _, _ = runs
    for name in (
        ".keras",
        ".weights.h5",
        ".h5",
        "_1.keras",
        "_2.keras",
        "_best.weights.h5",
    ):
        one, two = (
            launching.arrays_of(folders[n] / f"{mesh}{name}") for n in (1, 2)
        )
        assert len(one) >= 4
        assert one.keys() == two.keys()
        for key, value in one.items():
            np.testing.assert_allclose(
                two[key], value, rtol=1e-5, atol=1e-6, err_msg=key
            )
    # Plain Keras reads them, and nothing else was left.
    model = keras.models.load_model(folders[2] / f"{mesh}.keras")
    assert len(model.weights) == 4
    assert {path.name for path in folders[1].iterdir()} - {"0_of_1.json"} == {
        path.name for path in folders[2].iterdir()
    } - {"0_of_2.json", "1_of_2.json"}


def test_what_is_exported_runs_on_one_device(runs):
    import tensorflow as tf

    folders, _, _ = runs
    x = np.random.default_rng(0).normal(size=(3, 16)).astype("float32")
    one, two = (
        tf.saved_model.load(str(folders[n] / "2x2_exported")) for n in (1, 2)
    )
    np.testing.assert_allclose(two.serve(x), one.serve(x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "name, text",
    [
        ("batches", "hold different batches"),
        ("numbers", "{0: (False, 1), 1: (False, 2)}"),
        ("values", "hold different values"),
        ("models", "first difference: variable 'sequential/only_0/kernel'"),
        ("seeds", "given different seeds"),
        ("mesh", "no device of process(es) [1]|all devices in their order"),
    ],
)
def test_what_processes_hold_is_compared(name, text, runs):
    _, _, found = runs
    for index in (0, 1):
        said = found[index, 2]["errors/2x2"][name]
        # The frameworks differ in what they can.
        assert any(part in said for part in text.split("|")), said


def test_one_thing_is_under_way_at_a_time(runs):
    """Others could be under way in the other process, which then waits."""
    _, _, found = runs
    for index in (0, 1):
        order = found[index, 2]["order/2x2"]
        assert set(order.values()) == {"False"}, order
    # One process waits for nothing.
    alone = found[0, 1]["order/2x2"]
    assert set(alone.values()) == ({"True"} if BACKEND == "jax" else {"False"})


def test_one_process_prints(runs):
    _, results, _ = runs
    assert results[2].stdout.count("mae:") == 1, results[2].stdout


WAITS = """
import os, time
try:
    print("waiting", flush=True)
    # A signal may come to another thread of the runtime: it is looked for in
    # between.
    for _ in range(1000):
        time.sleep(0.1)
except KeyboardInterrupt:
    index = os.environ["KERAS_DISTRIBUTION_PROCESS_ID"]
    print(f"interrupted_{index}", flush=True)
"""

# What happens -> what has to stand in the output.
ENDS = {
    # These wait for longest.
    "one_saves": ["every process has to call it", "Missing: process(es) [1]"],
    "one_reads": ["every process has to call it", "Missing: process(es) [1]"],
    "kill_saving0": ["First error, process 0 of 2", "SIGKILL"],
    "kill_saving1": ["First error, process 1 of 2", "SIGKILL"],
    "kill_step": ["First error, process 1 of 2", "SIGKILL"],
    "raise": ["First error, process 1 of 2", "ValueError: the first error"],
    "exit": ["First error, process 1 of 2", "exit code 7"],
}
# As long as `KERAS_TP_TIMEOUT`, by default 45, and on a busy machine longer.
WAITING = ("one_saves", "one_reads", "slow_saving")


@pytest.fixture(scope="module")
def ends(request, tmp_path_factory):
    """How runs end: `(folder, result, seconds)` by what happens, or soon."""
    wanted = {
        item.callspec.params["what"]
        for item in request.session.items
        if item.originalname
        == test_an_error_ends_all_processes_in_time.__name__
        and not item.get_closest_marker("skip")
    }

    def end(what):
        folder = tmp_path_factory.mktemp(what)
        result = launch(
            *(ENDS_SCRIPT, what, folder),
            timeout=200,
            **({"KERAS_TP_TIMEOUT": "20"} if what in WAITING else {}),
        )
        ended = time.time()
        return folder, result, ended - (folder / "began").stat().st_mtime

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        names = [what for what in ENDS if what in wanted]
        yield {what: pool.submit(end, what) for what in (*names, "slow_saving")}


@pytest.mark.parametrize("what", ENDS)
def test_an_error_ends_all_processes_in_time(what, ends):
    folder, result, seconds = ends[what].result()
    assert result.returncode not in (0, None)
    last = launching.last_report(result.stderr)
    for text in ENDS[what]:
        assert text in last, result.stderr[-4000:]
    assert last.startswith("First error"), last
    assert seconds < 60
    assert not launching.running(str(folder))
    if what == "exit":
        assert result.returncode == 7
    # Whatever happened, the file is the one that was complete.
    launching.assert_holds(folder / "model.keras", folder / "saved.npz")


def test_the_others_wait_for_the_one_that_writes(ends):
    """A large file takes longer than processes wait for each other else."""
    folder, result, seconds = ends["slow_saving"].result()
    assert result.returncode == 0, result.stderr[-4000:]
    assert seconds > 20
    assert launching.arrays_of(folder / "model.keras")
    assert not list(folder.glob(".*.keras"))


def test_a_process_that_dies_while_it_starts(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(launching.KILL_AT_START)
    began = time.time()
    result = launch(
        *(ENDS_SCRIPT, "nothing", tmp_path),
        PYTHONPATH=f"{tmp_path}{os.pathsep}{ROOT}",
    )
    assert result.returncode == 137
    assert "First error, process 1 of 2:\nIt was ended by SIGKILL" in (
        result.stderr
    )
    assert time.time() - began < 60
    assert not (tmp_path / "began").exists()
    assert not launching.running(str(tmp_path))


LISTENERS = """
import os
import socket

from keras_tp import distribution as dist

dist.list_devices()
first = os.environ["KERAS_DISTRIBUTION_JOB_ADDRESSES"].split(",")[0]
if os.environ["KERAS_DISTRIBUTION_PROCESS_ID"] == "0":
    for host in ("127.0.0.1", "127.0.0.2"):
        try:
            address = host, int(first.rpartition(":")[2])
            socket.create_connection(address, timeout=20).close()
            print(host)
        except ConnectionRefusedError:
            pass
"""


@pytest.mark.skipif(BACKEND != "jax", reason="TensorFlow has no such setting")
def test_the_coordinator_listens_at_the_given_address_only(tmp_path):
    script = tmp_path / "listeners.py"
    script.write_text(LISTENERS)
    result = launch(script)
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == ["127.0.0.1"]


def test_signals_reach_every_process(tmp_path):
    script = tmp_path / "waits.py"
    script.write_text(WAITS)
    launcher = subprocess.Popen(
        command("--all-output", script),
        env=launching.environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        # Both are there.
        lines = [launcher.stdout.readline() for _ in range(2)]
        assert lines == ["waiting\n"] * 2
        launcher.send_signal(signal.SIGINT)
        output, _ = launcher.communicate(timeout=60)
    finally:
        launcher.kill()
    assert sorted(output.split()) == ["interrupted_0", "interrupted_1"]
    assert launcher.returncode == 130
    assert not launching.running(str(script))


def test_no_process_outlives_the_launcher(tmp_path):
    script = tmp_path / "waits.py"
    script.write_text(WAITS)
    launcher = subprocess.Popen(
        command(script),
        env=launching.environment(),
        stdout=subprocess.PIPE,
        text=True,
    )
    assert launcher.stdout.readline() == "waiting\n"
    launcher.kill()
    launcher.communicate(timeout=60)
    deadline = time.time() + 20
    while launching.running(str(script)) and time.time() < deadline:
        time.sleep(0.2)
    assert not launching.running(str(script))


VERIFIED = """
import keras
import numpy as np
from keras import layers
from keras_tp import distribution as dist


def build_model():
    inputs = keras.Input((16,))
    x = layers.Dense(32, activation="gelu", name="up")(inputs)
    model = keras.Model(inputs, layers.Dense(16, name="down")(x))
    model.compile("sgd", "mse")
    return model


if __name__ == "__main__":
    x = np.random.default_rng(0).normal(size=(8, 16)).astype("float32")
    report = dist.verify(build_model, dist.TensorParallel(), x, x)
    assert report.passed, report
    # To the last bit: nothing was split.
    assert report.weight_difference > 0
    assert dist.distribution() is None
"""


def test_a_model_is_verified(tmp_path):
    """One process trains the reference; all train the model."""
    script = tmp_path / "verified.py"
    script.write_text(VERIFIED)
    result = launch(script)
    assert result.returncode == 0, result.stderr[-4000:]


def hosts(script, *arguments, wait=120, count=2, **variables):
    """Runs a command on each of two "hosts", two addresses of this one."""
    addresses = (
        f"127.0.0.1:{launching.free_port()},127.0.0.2:{launching.free_port()}"
    )
    agents = [
        subprocess.Popen(
            [
                *(sys.executable, "-m", "keras_tp.launch", "--devices", "4"),
                *("--hosts", addresses, "--host-index", str(index)),
                *map(str, (script, *arguments)),
            ],
            env=launching.environment(**variables),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        for index in range(count)
    ]
    try:
        outputs = [agent.communicate(timeout=wait) for agent in agents]
    finally:
        for agent in agents:
            if agent.poll() is None:
                os.killpg(agent.pid, signal.SIGKILL)
    return [
        (agent.returncode, *output) for agent, output in zip(agents, outputs)
    ]


def test_two_hosts(tmp_path):
    for code, _, errors in hosts(ENDS_SCRIPT, "nothing", tmp_path):
        assert code == 0, errors[-3000:]


@pytest.mark.parametrize("what", ["kill_step", "kill_saving1"])
def test_a_process_that_dies_on_another_host(what, tmp_path):
    results = hosts(ENDS_SCRIPT, what, tmp_path, KERAS_TP_TIMEOUT="15")
    (code, _, errors), (other, _, _) = results
    assert code != 0 and other == 137
    # By its index, or where it was waited for.
    assert (
        "Process 1 has ended without an error" in errors
        or "but process(es) [1] of 2 did not arrive" in errors
    ), errors
    assert time.time() - (tmp_path / "began").stat().st_mtime < 60
    assert not launching.running(str(tmp_path))


def test_an_error_on_another_host(tmp_path):
    (code, _, errors), (other, _, _) = hosts(ENDS_SCRIPT, "raise", tmp_path)
    assert code != 0 and other != 0
    assert "process 1 failed: ValueError: the first error" in errors
    assert time.time() - (tmp_path / "began").stat().st_mtime < 60


SCHEDULED = """
from keras_tp import distribution as dist
dist.initialize()
# Once more does no harm.
dist.initialize()
with dist.DataParallel().scope():
    current, devices = dist.distribution(), dist.list_devices()
    print(current.num_processes, current.data_shard_id, len(devices))
"""


def test_a_scheduler_is_asked(tmp_path):
    """No variable of Keras's is set: those of SLURM, or DTensor, say it."""
    script = tmp_path / "scheduled.py"
    script.write_text(SCHEDULED)
    port = launching.free_port()

    def told(index):
        if BACKEND == "tensorflow":
            return {
                "DTENSOR_JOBS": f"127.0.0.1:{port},127.0.0.2:{port + 1}",
                "DTENSOR_NUM_CLIENTS": "2",
                "DTENSOR_CLIENT_ID": str(index),
            }
        return {
            "SLURM_JOB_ID": str(port),
            "SLURM_STEP_NODELIST": "127.0.0.1",
            "SLURM_NTASKS": "2",
            "SLURM_PROCID": str(index),
            "SLURM_LOCALID": str(index),
        }

    children = [
        subprocess.Popen(
            [sys.executable, str(script)],
            env=launching.environment(devices=2, **told(index)),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for index in (0, 1)
    ]
    try:
        outputs = [child.communicate(timeout=100) for child in children]
    finally:
        for child in children:
            child.kill()
    for index, (output, errors) in enumerate(outputs):
        assert output == f"2 {index} 4\n", errors[-3000:]


def test_a_host_that_does_not_start(tmp_path):
    began = time.time()
    ((code, _, errors),) = hosts(
        *(ENDS_SCRIPT, "nothing", tmp_path), count=1, KERAS_TP_TIMEOUT="5"
    )
    assert code != 0
    assert "Process(es) [1] of 2 did not start within 5 seconds" in errors
    assert time.time() - began < 60
    assert not (tmp_path / "began").exists()
