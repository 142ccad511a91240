"""Several processes: the shared tests in each of them, and how runs end.

One launch runs many tests. KERAS_TP_TORCH_DEVICES=4 runs them on four.
"""

import os
import pathlib
import signal
import subprocess
import sys
import time

import keras
import pytest

ROOT = pathlib.Path(__file__).parent.parent
HERE = pathlib.Path(__file__).parent
DEVICES = int(os.environ.get("KERAS_TP_TORCH_DEVICES", "2"))
RANKS = str(HERE / "torch_ranks.py")

# Files that run in every process -> what of them is left out (`-k`).
SHARED = {
    "torch_ops_test.py": "",
    "torch_models_test.py": "",
    "torch_shards_test.py": "",
    "parity_test.py": "",
    # Keras on torch takes a batch more from the data where the metrics are
    # not built yet, and the loader draws its seed then: counting, which
    # builds them, changes the masks that come after.
    "collectives_test.py": "counting_first",
    "residence_test.py": "",
    # Keras refuses steps_per_execution on torch.
    "training_test.py": "steps_per_execution",
    # A plain model is each process's own: all of them would write one file.
    "saving_test.py": "one or plain_keras",
}

pytestmark = pytest.mark.skipif(
    keras.config.backend() != "torch" or "RANK" in os.environ,
    reason="launches processes of torch",
)


def launch(*arguments, devices=DEVICES, timeout=600, **environment):
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
        capture_output=True,
        text=True,
        timeout=timeout,
    )


@pytest.mark.parametrize("file", SHARED)
def test_shared_tests_in_every_process(file, tmp_path):
    if not (HERE / file).exists():
        pytest.skip(f"there is no {file}")
    left_out = ["-k", f"not ({SHARED[file]})"] if SHARED[file] else []
    result = launch(
        RANKS,
        f"integration_tests/{file}",
        *left_out,
        *("-x", "--tb=short"),
        timeout=1800,
        KERAS_TP_RANK_FOLDER=str(tmp_path),
    )
    others = "".join(
        path.read_text()[-3000:] for path in tmp_path.glob("rank_*.txt")
    )
    assert result.returncode == 0, (
        result.stdout[-4000:] + result.stderr[-2000:] + others
    )
    assert "passed" in result.stdout, result.stdout[-2000:]


SCRIPT = """
import os, sys, time
import keras, numpy as np, torch
from keras import layers
from keras_tp import distribution as dist

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
    "seed": ["given different seeds", "{0: 0, 1: 1}"],
    "batch": ["hold different batches"],
    "random": ["hold different random states"],
    "save": ["every process has to call it", "Ranks 1 failed to pass"],
    "weights": ["every process has to call it", "Ranks 1 failed to pass"],
    "raise": ["ValueError: the first error"],
    "kill": ["SIGKILL"],
}


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "keras_tp_script_of_a_test.py"
    path.write_text(SCRIPT)
    return str(path)


def running(path):
    """Returns the ids of the processes whose command names a script."""
    found = []
    for folder in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            if path in (folder / "cmdline").read_text():
                found.append(int(folder.name))
        except OSError:
            continue
    return found


@pytest.mark.parametrize("what", ENDS)
def test_an_error_ends_all_processes_in_time(what, script, tmp_path):
    began = time.monotonic()
    result = launch(
        script, what, str(tmp_path / "m.keras"), devices=2, timeout=150
    )
    seconds = time.monotonic() - began
    assert result.returncode != 0
    output = result.stdout + result.stderr
    for text in ENDS[what]:
        assert text in output, output[-4000:]
    # A minute, and the start of the processes.
    assert seconds < 90
    assert not running(script)
    if what == "raise":
        # Before what it does to the other process.
        assert output.index("the first error") < output.index("Connection")


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
