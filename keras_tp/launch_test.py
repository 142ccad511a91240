import json
import os
import pathlib
import re
import subprocess
import sys

import keras
import pytest

from keras_tp import script_backend
from keras_tp.launch import main

ROOT = pathlib.Path(__file__).parent.parent
SCRIPT = """
import sys
from helper import NAME
from keras_tp import distribution as dist
if __name__ == "__main__":
    print(NAME, sys.argv[1:], dist.list_devices())
"""


def launch(*args, **env):
    env = {**os.environ, "PYTHONPATH": str(ROOT), **env}
    return subprocess.run(
        [sys.executable, "-m", "keras_tp.launch", *args],
        env={name: value for name, value in env.items() if value is not None},
        capture_output=True,
        text=True,
        timeout=120,
    )


CHOICES = {
    'os.environ["KERAS_BACKEND"] = "torch"': ("torch", True),
    'environ["KERAS_BACKEND"] = "jax"': ("jax", True),
    'os.environ.setdefault("KERAS_BACKEND", "jax")': ("jax", False),
    "if 'KERAS_BACKEND' not in os.environ:\n"
    "    os.environ['KERAS_BACKEND'] = 'jax'": ("jax", False),
    # These may not run.
    "if args.jax:\n    os.environ['KERAS_BACKEND'] = 'jax'": (None, False),
    "def use():\n    os.environ['KERAS_BACKEND'] = 'jax'": (None, False),
    'os.environ["KERAS_BACKEND"] = sys.argv[1]': (None, False),
    'os.environ["KERAS_HOME"] = "torch"': (None, False),
    'KERAS_BACKEND = "torch"': (None, False),
    'os.environ["KERAS_BACKEND" = "torch"': (None, False),
}


@pytest.mark.parametrize("text, expected", CHOICES.items(), ids=range(10))
def test_the_backend_that_a_script_chooses(text, expected, tmp_path):
    path = tmp_path / "train.py"
    path.write_text(f"import os\n{text}\n")
    assert script_backend.chosen_by(path) == expected


def test_a_script_that_chooses_its_backend(tmp_path):
    own = keras.config.backend()
    other = {"jax": "tensorflow", "tensorflow": "jax"}.get(own, "jax")
    path = tmp_path / "train.py"
    path.write_text(
        f'import os\nos.environ["KERAS_BACKEND"] = "{other}"\n'
        "import keras_tp\nimport keras\n"
        "print(keras.config.backend(), keras_tp.distribution.list_devices())\n"
    )
    result = launch("--devices", "2", str(path))
    assert result.returncode == 2
    assert f"sets KERAS_BACKEND to '{other}'" in result.stderr
    assert f"environment says '{own}'" in result.stderr
    # Without the variable Keras takes TensorFlow.
    result = launch("--devices", "2", str(path), KERAS_BACKEND=None)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines() == [f"{other} ['cpu:0', 'cpu:1']"]


@pytest.fixture
def script(tmp_path):
    (tmp_path / "helper.py").write_text("NAME = 'beside the script'\n")
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return str(path)


def test_a_script_runs_on_the_devices_asked_for(script):
    result = launch("--devices", "3", script, "--devices", "x")
    assert result.returncode == 0, result.stderr
    # On torch a device is a process, of which the first prints.
    assert result.stdout.splitlines() == [
        "beside the script ['--devices', 'x'] ['cpu:0', 'cpu:1', 'cpu:2']"
    ]


@pytest.mark.skipif(
    keras.config.backend() != "jax", reason="a variable that JAX reads"
)
@pytest.mark.parametrize("processes, second", [("1", "1"), ("2", "2048")])
def test_the_devices_asked_for_and_not_those_of_a_variable(
    script, processes, second
):
    result = launch(
        *("--devices", "2", "--processes", processes, script),
        JAX_NUM_CPU_DEVICES="4",
    )
    assert result.returncode == 0, result.stderr
    assert f"['cpu:0', 'cpu:{second}']" in result.stdout


def test_the_exit_code_and_the_error_are_the_scripts(tmp_path):
    path = tmp_path / "fails.py"
    path.write_text("import sys\nsys.exit(7)\n")
    result = launch("--devices", "2", str(path))
    assert result.returncode == 7
    path.write_text("raise RuntimeError('from the script')\n")
    result = launch("--devices", "2", str(path))
    assert result.returncode == 1
    assert "from the script" in result.stderr
    # Without the lines of the launcher.
    assert result.stderr.count('  File "') == 1


UNUSED = "[keras_tp.launch] Nothing was split over the 2 devices"


def test_a_script_that_sets_no_distribution_is_told_so(tmp_path):
    path = tmp_path / "train.py"
    path.write_text("from keras_tp import distribution as dist\n")
    result = launch("--devices", "2", str(path))
    assert result.returncode == 0
    assert result.stderr.count(UNUSED) == 1, result.stderr
    # Not if it fails, or if there is one device.
    assert UNUSED not in launch("--devices", "1", str(path)).stderr
    path.write_text("import keras_tp\n1 / 0\n")
    result = launch("--devices", "2", str(path))
    assert UNUSED not in result.stderr
    assert "ZeroDivisionError" in result.stderr


def test_a_script_that_sets_a_distribution_is_not(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(
        "from keras_tp import distribution as dist\n"
        "with dist.DataParallel().scope():\n    pass\n"
    )
    result = launch("--devices", "2", str(path))
    assert result.returncode == 0, result.stderr
    assert UNUSED not in result.stderr


def test_bad_arguments(script):
    result = launch("--devices", "0", script)
    assert result.returncode == 2
    assert "at least 1" in result.stderr
    assert launch(script).returncode == 2


def test_a_script_that_is_not_there(script):
    folder = pathlib.Path(script).parent
    result = launch("--devices", "2", str(folder / "trian.py"))
    assert result.returncode == 2
    assert result.stderr.splitlines()[-1] == (
        "python -m keras_tp.launch: error: there is no script 'trian.py' in "
        f"the folder {str(folder)!r}. Did you mean 'train.py'?"
    )
    result = launch("--devices", "2", str(folder / "src" / "train.py"))
    assert result.returncode == 2
    assert f"there is no folder {str(folder / 'src')!r}" in result.stderr


def test_dry_run_of_one_process(script):
    result = launch("--devices", "2", "--dry-run", script, "--mesh", "a b")
    assert result.returncode == 0, result.stderr
    (line,) = result.stdout.splitlines()
    assert line.endswith(f"{script} --mesh 'a b'")
    if keras.config.backend() == "torch":
        assert_torchrun(line, 2)
        assert "--redirects 1:3" in line
    else:
        assert DEVICES_SAID[keras.config.backend()].format(2) in line


def assert_torchrun(line, count):
    """No rendezvous but `static` is without a pickle from a socket."""
    assert re.search(
        r"torch.distributed.run --nnodes 1 --node-rank 0 --rdzv-backend static "
        rf"--master-addr 127.0.0.1 --master-port \d+ --nproc-per-node {count} ",
        line,
    ), line


DEVICES_SAID = {
    "jax": "xla_force_host_platform_device_count={}",
    "tensorflow": "KERAS_TP_CPU_DEVICES={}",
}
HOSTS = "10.0.0.1:9000,10.0.0.2:9100"


def test_dry_run_of_several_processes(script):
    """Says what each process is told, and starts none."""
    backend = keras.config.backend()
    count = "4" if backend == "torch" else "2"
    result = launch(
        *("--devices", "4", "--processes", count, "--dry-run", script)
    )
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    if backend == "torch":
        assert_torchrun(lines[0], 4)
        return
    assert len(lines) == 2
    for index, line in enumerate(lines):
        assert re.search(
            r"KERAS_DISTRIBUTION_JOB_ADDRESSES="
            r"127\.0\.0\.1:\d+,127\.0\.0\.1:\d+ ",
            line,
        )
        assert "KERAS_DISTRIBUTION_NUM_PROCESSES=2 " in line
        assert f"KERAS_DISTRIBUTION_PROCESS_ID={index} " in line
        # Each has its share of the devices.
        assert DEVICES_SAID[backend].format(2) in line
        assert line.endswith(f"-m keras_tp.backend.processes.child {script}")


def test_dry_run_of_the_second_host(script):
    backend = keras.config.backend()
    result = launch(
        *("--devices", "8", "--hosts", HOSTS, "--host-index", "1"),
        *(() if backend == "torch" else ("--processes", "4")),
        *("--dry-run", script),
    )
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    if backend == "torch":
        assert (
            "--nnodes 2 --node-rank 1 --rdzv-backend static --master-addr "
            "10.0.0.1 --master-port 9000 --nproc-per-node 4" in lines[0]
        )
        return
    assert len(lines) == 2
    for index, line in enumerate(lines, start=2):
        assert (
            "KERAS_DISTRIBUTION_JOB_ADDRESSES=10.0.0.1:9000,10.0.0.1:9001,"
            "10.0.0.2:9100,10.0.0.2:9101 " in line
        )
        assert "KERAS_DISTRIBUTION_NUM_PROCESSES=4 " in line
        assert f"KERAS_DISTRIBUTION_PROCESS_ID={index} " in line
        assert DEVICES_SAID[backend].format(2) in line


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--devices", "4", "--processes", "0"], "must be at least 1"),
        (
            ["--devices", "4", "--processes", "3"],
            "4 devices cannot be divided equally among 3 processes. 4 devices "
            "divide among 1, 2, 4 process(es), and 3 processes can have 3, 6, "
            "9 and so on devices",
        ),
        (["--devices", "4", "--hosts", "a:1,b:2"], "from 0 to 1"),
        (
            ["--devices", "4", "--hosts", "a:1,b:2", "--host-index", "2"],
            "from 0 to 1",
        ),
        (["--devices", "4", "--hosts", "a,b"], "must be HOST:PORT,..."),
        (["--devices", "4", "--host-index", "0"], "pass --hosts too"),
        (
            ["--devices", "6", "--processes", "3", "--hosts", "a:1,b:2"]
            + ["--host-index", "0"],
            "3 processes cannot be divided among 2 hosts; 2, 4, 6 and so on",
        ),
    ],
)
def test_what_does_not_divide(arguments, message, capsys):
    with pytest.raises(SystemExit) as error:
        main([*arguments, "train.py"])
    assert error.value.code == 2
    said = capsys.readouterr().err
    assert message in said.replace("\n", " "), said


@pytest.mark.skipif(
    keras.config.backend() != "torch", reason="elsewhere it may have several"
)
def test_on_torch_a_device_has_a_process(script):
    result = launch("--devices", "4", "--processes", "2", script)
    assert result.returncode == 1
    assert "each device has a process of its own" in result.stderr
    assert "--devices 4 --processes 2" in result.stderr


def test_a_backend_that_cannot_distribute(script):
    result = launch("--devices", "2", script, KERAS_BACKEND="numpy")
    assert result.returncode == 1
    assert "Supported backends: 'jax'" in result.stderr


@pytest.fixture
def printed(capsys):
    """Returns a function that returns the command of an engine."""

    def show(engine, *options):
        main(["--print-env", engine, *options, "train.py", "--size", "a b"])
        return capsys.readouterr().out.strip()

    return show


# The devices of a process, in each of the processes.
SEVERAL = [] if keras.config.backend() == "torch" else ["--processes", "2"]
COUNT = ["--devices", "2" if keras.config.backend() == "torch" else "4"]
ON_HOSTS = ["--hosts", "a:9000,b:9100"]


def test_the_command_of_slurm(printed):
    backend = keras.config.backend()
    said = printed("slurm", *COUNT, *SEVERAL)
    assert said.startswith(f"KERAS_BACKEND={backend} ")
    command = (
        "srun --ntasks 2 {}--distribution block --kill-on-bad-exit=1 python "
        "train.py --size 'a b'"
    )
    assert said.endswith(command.format(""))
    if SEVERAL:
        assert DEVICES_SAID[backend].format(2) in said
    said = printed("slurm", *COUNT, *SEVERAL, *ON_HOSTS)
    assert said.endswith(command.format("--ntasks-per-node 1 --nodelist a,b "))


def test_the_command_of_open_mpi(printed):
    backend = keras.config.backend()
    said = printed("mpi", *COUNT, *SEVERAL)
    assert said.startswith(f"mpirun -n 2 -x KERAS_BACKEND={backend} ")
    assert said.endswith("python train.py --size 'a b'")
    assert "ADDRESSES" not in said
    said = printed("mpi", *COUNT, *SEVERAL, *ON_HOSTS)
    assert " --host a:1,b:1 " in said
    assert " -x KERAS_DISTRIBUTION_JOB_ADDRESSES=a:9000,b:9100 " in said
    assert " -x KERAS_TP_SECRET " in said


def test_the_manifest_for_kubernetes(printed):
    service, job = json.loads(printed("k8s", *COUNT, *SEVERAL))["items"]
    name = service["metadata"]["name"]
    spec = job["spec"]
    assert spec["completionMode"] == "Indexed"
    assert spec["completions"] == spec["parallelism"] == 2
    pod = spec["template"]["spec"]
    assert pod["subdomain"] == name
    (container,) = pod["containers"]
    assert container["command"] == ["python", "train.py", "--size", "a b"]
    told = {entry["name"]: entry.get("value") for entry in container["env"]}
    assert told["KERAS_DISTRIBUTION_JOB_ADDRESSES"] == (
        f"{name}-0.{name}:9000,{name}-1.{name}:9000"
    )
    assert told["KERAS_DISTRIBUTION_NUM_PROCESSES"] == "2"
    assert {"KERAS_DISTRIBUTION_PROCESS_ID", "KERAS_TP_SECRET"} <= set(told)


STARTED = {
    "Open MPI": {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "1"},
    "SLURM": {
        "SLURM_STEP_NODELIST": "node1",
        "SLURM_NTASKS": "4",
        "SLURM_PROCID": "1",
    },
}


@pytest.mark.parametrize("engine", STARTED)
def test_an_engine_has_started_several_launchers(engine, monkeypatch, capsys):
    for name, value in STARTED[engine].items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as error:
        main(["--devices", "4", "train.py"])
    assert error.value.code == 2
    said = " ".join(capsys.readouterr().err.split())
    command = {"Open MPI": "mpirun", "SLURM": "srun"}[engine]
    assert f"{engine} has started 4 processes" in said
    assert f"`{command} -n 4 python train.py`" in said
    # One launcher for each host is another thing.
    main(
        [
            *("--devices", "4", "--hosts", "a:9000,b:9000"),
            *("--host-index", "1", "--dry-run", "train.py"),
        ]
    )
    assert "train.py" in capsys.readouterr().out


def test_the_program_for_ray(printed):
    said = printed("ray", *COUNT, *SEVERAL)
    compile(said, "run.py", "exec")
    assert "ARGUMENTS = ['train.py', '--size', 'a b']" in said
    assert f"'KERAS_BACKEND': {keras.config.backend()!r}" in said
    assert "COUNT = 2\n" in said
