"""Runs of `examples/engines/train.py` that an engine has started."""

import json
import os
import pathlib
import re
import secrets
import signal
import subprocess
import sys
import time

from integration_tests import launching
from keras_tp.backend.processes import supervisor

SCRIPT = "examples/engines/train.py"
# The variable with the index of a process.
INDEX = {
    "openmpi": "OMPI_COMM_WORLD_RANK",
    "slurm": "SLURM_PROCID",
    "ray": supervisor.INDEX,
    "ray train": "RANK",
    "k8s": supervisor.INDEX,
    "torchrun": "RANK",
}
COUNT = int(os.environ.get("KERAS_TP_ENGINE_PROCESSES", "4"))
# Seconds in which a run has to start or to end, on a busy machine.
START_S = 300


class Run:
    """A run that an engine has started, and its output so far.

    Args:
        command: List of strings.
        folder: Path of a new folder. It is an argument of the script, so that
            the command of each process names it.
        backend: String, the backend.
        variables: More environment variables.
    """

    def __init__(self, command, folder, backend, **variables):
        folder.mkdir(exist_ok=True)
        self.folder = folder
        self._output = folder / "output"
        with open(self._output, "a") as file:
            self.process = subprocess.Popen(
                command,
                env={**environment(backend), **variables},
                stdout=file,
                stderr=file,
                start_new_session=True,
            )

    @property
    def output(self):
        return self._output.read_text()

    def has_ended(self):
        """Returns whether the engine says so."""
        return self.process.poll() is not None

    def succeeded(self):
        """Returns whether the engine says so."""
        return self.process.returncode == 0

    def wait_for(self, text):
        """Waits until the output has a text."""
        deadline = time.monotonic() + START_S
        while text not in self.output:
            if self.has_ended() or time.monotonic() > deadline:
                raise AssertionError(f"no {text!r} in:\n{self.output}")
            time.sleep(0.05)

    def processes(self):
        """Returns the ids of the processes that run the script."""
        return [
            number
            for number in launching.running(str(self.folder))
            # Not an engine's command, which names the script as well.
            if re.match(
                rf"[^\0]*python[^\0]*\0(-u\0)?{SCRIPT}",
                _read(number, "cmdline"),
            )
        ]

    def process_of(self, variable, index):
        """Returns the id of the process with an index."""
        text = f"{variable}={index}"
        (found,) = (
            number
            for number in self.processes()
            if text in _read(number, "environ").split("\0")
        )
        return found

    def seconds_to_end(self, began):
        """Waits until no process is left; returns the seconds."""
        deadline = time.monotonic() + START_S
        while not self.has_ended() or self.processes():
            if time.monotonic() > deadline:
                raise AssertionError(f"it goes on:\n{self.output}")
            time.sleep(0.05)
        return time.monotonic() - began

    def send(self, number):
        """Sends a signal to all processes."""
        for found in self.processes():
            try:
                os.kill(found, number)
            except ProcessLookupError:
                continue

    def cancel(self):
        """Ends the run as its user would."""
        self.process.send_signal(signal.SIGINT)

    def kill(self):
        """Ends processes that a failed check has left running."""
        self.process.kill()
        self.process.wait()
        self.send(signal.SIGKILL)


class Actors(Run):
    """A run whose processes are actors of Ray."""

    def processes(self):
        return [
            number
            for number in launching.running("ray::Process")
            if INDEX["ray"] in _read(number, "environ")
        ]


class Trainer(Run):
    """A run whose processes are workers of Ray Train."""

    def processes(self):
        return launching.running("ray::RayTrainWorker")

    def process_of(self, variable, index):
        # Ray Train sets the variable later.
        return sorted(self.processes())[index]


class Pods(Run):
    """The environment of each pod of a job of Kubernetes, without pods.

    Args:
        manifests: List of dicts: a service and an indexed job.
        folder: As in `Run`.
        backend: String, the backend.
        missing: Int. How many of the last pods do not come. Defaults to 0.
    """

    def __init__(self, manifests, folder, backend, missing=0):
        folder.mkdir(exist_ok=True)
        self.folder = folder
        self._output = folder / "output"
        spec = manifests[1]["spec"]
        (container,) = spec["template"]["spec"]["containers"]
        given = {row["name"]: row.get("value") for row in container["env"]}
        ports = supervisor.free_ports(spec["completions"])
        given[supervisor.ADDRESSES] = ",".join(
            f"127.0.0.1:{port}" for port in ports
        )
        given["KERAS_TP_SECRET"] = secrets.token_hex(16)
        self._pods = []
        for index in range(spec["completions"] - missing):
            given[supervisor.INDEX] = str(index)
            with open(self._output, "a") as file:
                self._pods.append(
                    subprocess.Popen(
                        container["command"],
                        env={**environment(backend), **given},
                        stdout=file,
                        stderr=file,
                        start_new_session=True,
                    )
                )

    def has_ended(self):
        return all(pod.poll() is not None for pod in self._pods)

    def succeeded(self):
        return all(pod.returncode == 0 for pod in self._pods)

    def kill(self):
        for pod in self._pods:
            pod.kill()
            pod.wait()
        self.send(signal.SIGKILL)


class Job(Run):
    """A job of SLURM. Each backend has a batch script of its own.

    Args:
        arguments: List of strings, arguments of the script.
        folder: As in `Run`.
        backend: String, the backend.
    """

    def __init__(self, arguments, folder, backend):
        folder.mkdir(exist_ok=True)
        self.folder = folder
        self._output = folder / "output"
        self._output.touch()
        variables = environment(backend)
        # The script says these.
        del variables["KERAS_BACKEND"], variables["KERAS_TP_SECRET"]
        self.number = said(
            *("sbatch", "--parsable", "--output", self._output),
            *(f"--ntasks-per-node={COUNT // 2}",),
            *(f"examples/slurm/{backend}.sh", *arguments),
            env=variables,
        )

    def state(self):
        """Returns SLURM's word for the state of the job."""
        found = said("scontrol", "show", "job", self.number)
        return re.search(r"JobState=(\w+)", found)[1]

    def has_ended(self):
        return self.state() not in ("PENDING", "RUNNING", "COMPLETING")

    def succeeded(self):
        return self.state() == "COMPLETED"

    def cancel(self):
        said("scancel", self.number)

    def kill(self):
        subprocess.run(["scancel", self.number])
        self.send(signal.SIGKILL)


def said(*arguments, env=None):
    """Runs a command; returns what it prints."""
    return subprocess.run(
        list(map(str, arguments)),
        env=env,
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        timeout=START_S,
    ).stdout.strip()


def _read(number, name):
    try:
        return pathlib.Path(f"/proc/{number}/{name}").read_text()
    except OSError:
        return ""


def environment(backend):
    """Returns the variables of a run, with one device in each process."""
    # The commands start `python`.
    folder = pathlib.Path(sys.executable).parent
    return launching.environment(
        devices=1,
        PATH=f"{folder}{os.pathsep}{os.environ['PATH']}",
        KERAS_BACKEND=backend,
        KERAS_TP_SECRET=secrets.token_hex(16),
        OMP_NUM_THREADS="1",
        # mpirun refuses both without these.
        OMPI_ALLOW_RUN_AS_ROOT="1",
        OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1",
        OMPI_MCA_rmaps_base_oversubscribe="1",
        # Ray leaves out equal lines of several processes.
        RAY_DEDUP_LOGS="0",
        # Ray Train prints each line twice.
        RAY_TRAIN_ENABLE_PRINT_PATCH="0",
        TF_CPP_MIN_LOG_LEVEL="3",
    )


def start(engine, backend, folder, *arguments, restarts=0):
    """Starts the script by an engine, and returns the run."""
    arguments = [*map(str, arguments), "--backup", str(folder)]
    if engine == "ray train":
        command = [sys.executable, "examples/ray/torch_trainer.py"]
        command += ["--workers", str(COUNT), "--restarts", str(restarts)]
        command += ["--storage", str(folder), SCRIPT, *arguments]
        return Trainer(command, folder, backend)
    if engine in ("ray", "k8s"):
        return start_printed(
            engine, backend, folder, COUNT, *arguments, restarts=restarts
        )
    if engine == "slurm":
        return Job(arguments, folder, backend)
    if engine == "torchrun":
        command = [sys.executable, "-m", "torch.distributed.run"]
        command += ["--nproc-per-node", str(COUNT)]
        command += ["--max-restarts", str(restarts)]
        return Run([*command, SCRIPT, *arguments], folder, backend)
    command = ["mpirun", "-n", str(COUNT), "python", SCRIPT, *arguments]
    return Run(command, folder, backend)


def printed(engine, backend, processes, *arguments):
    """Returns what `launch --print-env` prints."""
    devices = max(COUNT, processes)
    return said(
        *(sys.executable, "-m", "keras_tp.launch", "--print-env", engine),
        *("--devices", devices, "--processes", processes, SCRIPT, *arguments),
        env=environment(backend),
    )


def start_printed(engine, backend, folder, processes, *arguments, restarts=0):
    """Runs the command that `launch --print-env` prints."""
    word = {"openmpi": "mpi"}.get(engine, engine)
    text = printed(word, backend, processes, *arguments)
    if engine == "k8s":
        return Pods(json.loads(text)["items"], folder, backend)
    if engine != "ray":
        return Run(["bash", "-c", text], folder, backend)
    folder.mkdir()
    (folder / "run.py").write_text(text)
    return Actors(
        [sys.executable, folder / "run.py"],
        folder,
        backend,
        KERAS_TP_RESTARTS=str(restarts),
    )
