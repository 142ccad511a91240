"""Kills processes while they save, and looks for a save that is lost.

    KERAS_BACKEND=jax python integration_tests/fuzz_kills.py \
        --what weights checkpoint --seed 1 --count 200
    KERAS_BACKEND=jax python integration_tests/fuzz_kills.py --processes 2

Each save is of another value in all variables. With one process, a fork of it
saves and is killed at a random moment. With several, or on TensorFlow, forks
that have not started a runtime save one value after the other, and one of them
is killed; the others end by themselves. The file then holds one save as a
whole: the last that was complete, or the one under way. When a save has come to
its end nothing is left behind by those that were killed.
"""

import argparse
import atexit
import collections
import contextlib
import json
import os
import pathlib
import random
import secrets
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings

# Started as a file, Python looks for packages in its folder alone.
sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))

import keras
import numpy as np

from integration_tests import fuzz_files
from integration_tests import launching
from keras_tp import distribution
from keras_tp.backend.processes import rendezvous
from keras_tp.backend.processes import supervisor
from keras_tp.backend.saving import checkpoint_folder
from keras_tp.backend.saving import digests
from keras_tp.backend.saving import one_writer
from keras_tp.backend.saving import sharded_files

NAMES = {
    "weights": "a.weights.h5",
    "parts": "a.weights.json",
    "model": "a.keras",
    "legacy": "a.h5",
    "folder": "a",
    "checkpoint": "a.checkpoint",
}
LIMIT_S = 120
FOR_EVER = 10**9
_APPEND = os.O_WRONLY | os.O_CREAT | os.O_APPEND
# A fork of TensorFlow, after its runtime has started, waits for threads that it
# does not have.
FORKS = keras.config.backend() != "tensorflow"


def fill(model, value):
    for variable in fuzz_files.variables_of(model):
        variable.assign(np.full(variable.shape, value, variable.dtype))


def save(model, path):
    if path.name in (NAMES["model"], NAMES["legacy"]):
        model.save(path)
    elif path.name == NAMES["checkpoint"]:
        distribution.save_checkpoint(path, model)
    elif path.name == NAMES["folder"]:
        keras.saving.save_model(model, path, zipped=False)
    elif path.suffix == ".json":
        model.save_weights(path, max_shard_size=fuzz_files.PART_BYTES / 2**30)
    else:
        model.save_weights(path)


def value_of(path):
    """Returns the number that all variables of a save have."""
    if path.name == NAMES["checkpoint"]:
        return value_of_checkpoint(path)
    files = [path]
    if path.suffix == ".json":
        sharded_files.check(path)
        config = json.loads(path.read_text())
        files = {path.with_name(n) for n in sharded_files._names(config)}
    elif path.is_dir():
        digests.check_folder(path)
        files = [path / "model.weights.h5"]
    held = {
        float(x)
        for file in files
        for array in launching.arrays_of(file).values()
        for x in np.unique(array)
    }
    (value,) = held
    return value


def value_of_checkpoint(path):
    """Returns the number that all variables of a checkpoint have."""
    folder, held = checkpoint_folder.CheckpointFolder(path), set()
    for name, (shape, dtype) in folder.tensors.items():
        whole = tuple((0, size) for size in shape)
        folder.check(name, [whole])
        if not name.startswith("state/"):
            array = np.empty(shape, dtype)
            folder.copy_to(array, name, whole)
            held |= {float(x) for x in np.unique(array)}
    (value,) = held
    return value


def outcome_of(path, allowed):
    if not path.exists():
        return "lost"
    try:
        value = value_of(path)
    except (OSError, ValueError, LookupError, RuntimeError) as e:
        return f"mixed: {e!r}"
    return (
        "older"
        if value == allowed[0]
        else ("newer" if value == allowed[1] else f"another value, {value}")
    )


def leftovers(path):
    """Returns the files beside a save that do not belong to it."""
    own = {path.name}
    if path.suffix == ".json":
        own |= {sharded_files._first_of(path)}
        own |= set(sharded_files._names(json.loads(path.read_text())))
    found = set(os.listdir(path.parent)) - own
    if path.name == NAMES["checkpoint"]:
        listed = checkpoint_folder._listed(path)
        found |= set(os.listdir(path)) - listed - {checkpoint_folder.INDEX}
    elif path.is_dir():
        found |= set(os.listdir(path)) - one_writer._FOLDER
    return sorted(found)


def forked(model, path):
    """Starts a save in a fork of this process, and returns its id."""
    process = os.fork()
    if process == 0:
        code = 1
        try:
            save(model, path)
            code = 0
        finally:
            os._exit(code)
    return process


def ended(process):
    """Waits for a process; returns its code, negative if it was killed."""
    end = time.monotonic() + LIMIT_S
    while time.monotonic() < end:
        found, status = os.waitpid(process, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.001)
    os.kill(process, signal.SIGKILL)
    os.waitpid(process, 0)
    raise RuntimeError(f"A save took longer than {LIMIT_S} s.")


def search(kind, seed, count):
    """Kills forks of this process while they save.

    Args:
        kind: String, a key of `NAMES`.
        seed: Int.
        count: Int, number of kills.

    Returns:
        A pair: a `Counter` of outcomes, and a list of defects.
    """
    draw = random.Random(f"{kind} {seed}")
    outcomes, defects = collections.Counter(), []
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        path = pathlib.Path(folder) / NAMES[kind]
        with fuzz_files.scope():
            model = fuzz_files.network()
            held, value = 1, 1
            fill(model, value)
            save(model, path)
            began = time.monotonic()
            assert ended(forked(model, path)) == 0
            spread = time.monotonic() - began
            while sum(outcomes.values()) < count:
                value += 1
                fill(model, value)
                process = forked(model, path)
                time.sleep(draw.uniform(0, spread))
                os.kill(process, signal.SIGKILL)
                if ended(process) == 0:
                    # It came to its end before.
                    held = value
                    spread *= 0.95
                    if leftovers(path):
                        defects.append(f"left over: {leftovers(path)}")
                    continue
                spread *= 1.01
                found = outcome_of(path, (held, value))
                outcomes[found] += 1
                if found not in ("older", "newer"):
                    defects.append(f"save {value} over {held}: {found}")
                    save(model, path)
                held = value if found != "older" else held
            save(model, path)
        if leftovers(path):
            defects.append(f"left over: {leftovers(path)}")
        if value_of(path) != value:
            defects.append("the last save is not there")
    return outcomes, defects


def save_often(path, processes, times):
    """Saves one value after the other, in each process of a run."""
    if processes > 1:
        distribution.initialize()
    with fuzz_files.scope():
        model = fuzz_files.network()
        value = int(value_of(path)) if path.exists() else 0
        for _ in range(times):
            value += 1
            fill(model, value)
            save(model, path)
            # At once, so that a kill cannot cut the line.
            line = os.open(saved_of(path), _APPEND, 0o600)
            os.write(line, b"%d\n" % value)
            os.close(line)


@contextlib.contextmanager
def folder_of_parent():
    """A temporary folder that a fork does not remove when it ends."""
    folder = tempfile.mkdtemp()
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


def saved_of(path):
    """Returns the file that lists the values whose save has ended."""
    return path.parent.parent / "saved.txt"


def log_of(path):
    """Returns the file that the processes of a run write to."""
    return path.parent.parent / "log.txt"


def forked_run(path, processes, times):
    """Starts a run as forks of this process, and returns their ids.

    They need not import a framework again, and the runtime of none has started
    here. Each joins the others by the variables that a launcher would set.
    """
    ports = supervisor.free_ports(processes)
    addresses = [f"127.0.0.1:{port}" for port in ports]
    host, port = addresses[0].split(":")
    variables = {
        "KERAS_DISTRIBUTION_JOB_ADDRESSES": ",".join(addresses),
        "KERAS_DISTRIBUTION_NUM_PROCESSES": str(processes),
        rendezvous.SECRET: secrets.token_hex(16),
    }
    if keras.config.backend() == "torch":
        variables.update(MASTER_ADDR=host, MASTER_PORT=port)
        variables["WORLD_SIZE"] = str(processes)
        variables["LOCAL_WORLD_SIZE"] = str(processes)
    log_of(path).unlink(missing_ok=True)
    found = []
    for index in range(processes):
        process = os.fork()
        if process == 0:
            code = 1
            try:
                variables["KERAS_DISTRIBUTION_PROCESS_ID"] = str(index)
                if "WORLD_SIZE" in variables:
                    variables.update(RANK=str(index), LOCAL_RANK=str(index))
                os.environ.update(variables)
                output = os.open(log_of(path), _APPEND, 0o600)
                os.dup2(output, 1)
                os.dup2(output, 2)
                save_often(path, processes, times)
                # They end together, as processes do that are not forks.
                atexit._run_exitfuncs()
                code = 0
            except BaseException:
                traceback.print_exc()
                raise
            finally:
                os._exit(code)
        found.append(process)
    return found


def search_runs(kind, seed, count, processes):
    """Kills one process of a run that saves, as `search`."""
    draw = random.Random(f"{kind} {seed} {processes}")
    outcomes, defects = collections.Counter(), []
    with folder_of_parent() as folder:
        path = pathlib.Path(folder, "saves", NAMES[kind])
        path.parent.mkdir()
        before = 0
        for _ in range(count):
            run = forked_run(path, processes, FOR_EVER)
            try:
                # Until something was saved in this run.
                _wait_for_more(path, before)
                time.sleep(draw.uniform(0, 0.3))
                os.kill(draw.choice(run), signal.SIGKILL)
            finally:
                # The others end by themselves.
                for process in run:
                    ended(process)
            # A save that a process took for complete is not lost.
            saved_of(path).touch()
            done = max([before, *map(int, saved_of(path).read_text().split())])
            value = _held(path)
            is_whole = value in (done, done + 1) and value > before
            outcomes["whole" if is_whole else "lost or mixed"] += 1
            if not is_whole:
                defects.append(f"{value} after {done}")
            before = max(value, before)
            # A killed run may leave the files of one save, and no more.
            if len(leftovers(path)) > 8:
                defects.append(f"left over: {leftovers(path)}")
        codes = [ended(process) for process in forked_run(path, processes, 1)]
        if any(codes) or _held(path) != before + 1:
            defects.append(f"the last save is not there: {codes}")
        if leftovers(path):
            defects.append(f"left over: {leftovers(path)}")
    return outcomes, defects


def _held(path):
    """Returns the value of a save, 0 if there is none that is whole.

    While processes save, parts may go between two looks at them.
    """
    try:
        return value_of(path)
    except (OSError, ValueError, LookupError, RuntimeError):
        return 0


def _wait_for_more(path, value):
    end = time.monotonic() + LIMIT_S
    while _held(path) <= value:
        if time.monotonic() > end:
            said = log_of(path).read_text()
            raise RuntimeError(
                f"Nothing was saved within {LIMIT_S} s. A process said:\n{said}"
            )
        time.sleep(0.01)


def main(argv):
    parser = argparse.ArgumentParser()
    parser.add_argument("--what", nargs="+", choices=NAMES, default=NAMES)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--processes", type=int, default=1)
    arguments = parser.parse_args(argv)
    found = 0
    for kind in arguments.what:
        case = (kind, arguments.seed, arguments.count)
        if arguments.processes == 1 and FORKS:
            outcomes, defects = search(*case)
        else:
            outcomes, defects = search_runs(*case, arguments.processes)
        title = (
            f"kills {kind} seed={arguments.seed} count={arguments.count} "
            f"processes={arguments.processes}"
        )
        found += fuzz_files.report(title, outcomes, defects)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
