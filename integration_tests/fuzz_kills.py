"""Kills processes while they save, and looks for a save that is lost.

    KERAS_BACKEND=jax python integration_tests/fuzz_kills.py \
        --what weights parts model --seed 1 --count 200
    KERAS_BACKEND=jax python integration_tests/fuzz_kills.py --processes 2

Each save is of another value in all variables. With one process, a fork of it
saves and is killed at a random moment. With several, or on TensorFlow, a run is
started, and one of its processes is killed. The file then holds one save as a
whole: the last that was complete, or the one under way. When a save has come to
its end nothing is left behind by those that were killed.
"""

import argparse
import collections
import functools
import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import tempfile
import time
import warnings

import keras
import numpy as np

from integration_tests import fuzz_files
from integration_tests import launching
from keras_tp.backend import parts

ROOT = pathlib.Path(__file__).parent.parent
NAMES = {
    "weights": "a.weights.h5",
    "parts": "a.weights.json",
    "model": "a.keras",
}
LIMIT_S = 120
# A fork of TensorFlow waits for threads that it does not have. There each kill
# is of a run.
FORKS = keras.config.backend() != "tensorflow"


def fill(model, value):
    for variable in fuzz_files.variables_of(model):
        variable.assign(np.full(variable.shape, value, variable.dtype))


def save(model, path):
    if path.suffix == ".keras":
        model.save(path)
    elif path.suffix == ".json":
        model.save_weights(path, max_shard_size=fuzz_files.PART_BYTES / 2**30)
    else:
        model.save_weights(path)


def value_of(path):
    """Returns the number that all variables of a save have."""
    files = [path]
    if path.suffix == ".json":
        parts.check(path)
        config = json.loads(path.read_text())
        files = {path.with_name(n) for n in parts._names(config)}
    held = {
        float(x)
        for file in files
        for array in launching.arrays_of(file).values()
        for x in np.unique(array)
    }
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
        own |= {parts._first_of(path)}
        own |= set(parts._names(json.loads(path.read_text())))
    return sorted(set(os.listdir(path.parent)) - own)


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


def save_for_ever(path):
    """Saves one value after the other, in each process of a run."""
    path = pathlib.Path(path)
    warnings.simplefilter("ignore")
    with fuzz_files.scope():
        model = fuzz_files.network()
        value = int(value_of(path)) if path.exists() else 0
        (path.parent.parent / f"process_{os.getpid()}").touch()
        while True:
            value += 1
            fill(model, value)
            save(model, path)


def search_runs(kind, seed, count, processes):
    """Kills one process of a run that saves, as `search`."""
    draw = random.Random(f"{kind} {seed} {processes}")
    outcomes, defects = collections.Counter(), []
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "files" / NAMES[kind]
        path.parent.mkdir()
        command = [sys.executable, "-m", "keras_tp.launch", "--devices", "2"]
        if keras.config.backend() != "torch":
            # There it is one for each device.
            command += ["--processes", str(processes)]
        command += [__file__, "--save-for-ever", str(path)]
        before = 0
        for _ in range(count):
            run = subprocess.Popen(
                command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
            )
            try:
                _wait(lambda: len(_started(folder)) == processes, run)
                # Until something was saved in this run.
                _wait(functools.partial(_is_newer, path, before), run)
                time.sleep(draw.uniform(0, 0.3))
                os.kill(draw.choice(_started(folder)), signal.SIGKILL)
                run.wait(LIMIT_S)
            finally:
                run.kill()
                run.wait()
            for mark in pathlib.Path(folder).glob("process_*"):
                mark.unlink()
            value = _held(path)
            outcomes["whole" if value > before else "lost or mixed"] += 1
            if value <= before:
                defects.append(f"{value} after {before}")
            before = max(value, before)
            # A killed run may leave the files of one save, and no more.
            if len(leftovers(path)) > 8:
                defects.append(f"left over: {leftovers(path)}")
    return outcomes, defects


def _started(folder):
    marks = pathlib.Path(folder).glob("process_*")
    return sorted(int(mark.name.partition("_")[2]) for mark in marks)


def _held(path):
    """Returns the value of a save, 0 if there is none that is whole.

    While processes save, parts may go between two looks at them.
    """
    try:
        return value_of(path)
    except (OSError, ValueError, LookupError, RuntimeError):
        return 0


def _is_newer(path, value):
    return _held(path) > value


def _wait(is_so, run):
    end = time.monotonic() + LIMIT_S
    while not is_so():
        if run.poll() is not None or time.monotonic() > end:
            raise RuntimeError(f"The run ended early: {run.poll()}")
        time.sleep(0.01)


def main(argv):
    parser = argparse.ArgumentParser()
    parser.add_argument("--what", nargs="+", choices=NAMES, default=NAMES)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--save-for-ever")
    arguments = parser.parse_args(argv)
    if arguments.save_for_ever:
        return save_for_ever(arguments.save_for_ever)
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
