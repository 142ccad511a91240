"""What runs of several processes are given, and leave behind."""

import os
import pathlib
import subprocess
import sys
import zipfile

import h5py
import numpy as np

# Python runs it when it starts.
KILL_AT_START = """
import os, signal, threading
if "1" in map(os.environ.get, ("KERAS_DISTRIBUTION_PROCESS_ID", "RANK")):
    end = os.kill, (os.getpid(), signal.SIGKILL)
    threading.Timer(1, *end).start()
"""


ROOT = pathlib.Path(__file__).parent.parent
_COUNT = "--xla_force_host_platform_device_count"


def environment(devices=None, **variables):
    """Returns the environment of a process that makes its own devices.

    Args:
        devices: Int, number of virtual devices that JAX or TensorFlow makes
            when it is imported. Defaults to `None`: the process sets it.
        **variables: Strings, environment variables to add or replace.
    """
    kept = dict(os.environ)
    kept.pop("KERAS_TP_CPU_DEVICES", None)
    flags = kept.pop("XLA_FLAGS", "").split()
    flags = [f for f in flags if not f.startswith(_COUNT)]
    if devices is not None:
        flags.append(f"{_COUNT}={devices}")
        kept["KERAS_TP_CPU_DEVICES"] = str(devices)
    if flags:
        kept["XLA_FLAGS"] = " ".join(flags)
    return {**kept, "PYTHONPATH": str(ROOT), **variables}


def output_of(*arguments, folder=ROOT, timeout=300):
    """Runs Python, which has to succeed, and returns its standard output.

    Args:
        *arguments: Strings, of Python.
        folder: Path, where it runs. Defaults to the checkout.
        timeout: Int, seconds. Defaults to 300.
    """
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def running(text):
    """Returns the ids of the processes whose command contains a text."""
    found = []
    for folder in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            if text in (folder / "cmdline").read_text():
                found.append(int(folder.name))
        except OSError:
            continue
    return found


def last_report(errors):
    """Returns what a launcher wrote last about a process that failed."""
    return errors.rpartition("[keras_tp.launch] ")[2]


def arrays_of(path):
    """Returns the arrays of a file that Keras wrote."""
    found = {}

    def keep(name, item):
        if isinstance(item, h5py.Dataset):
            found[name] = item[()]

    if path.suffix == ".keras":
        with zipfile.ZipFile(path) as archive:
            inside = archive.open("model.weights.h5")
            with h5py.File(inside) as file:
                file.visititems(keep)
    else:
        with h5py.File(path) as file:
            file.visititems(keep)
    return found


def assert_holds(path, saved):
    """Checks that a file of Keras has the weights of an `.npz` file."""
    held = list(arrays_of(path).values())
    with np.load(saved) as expected:
        assert expected.files
        for name, value in expected.items():
            assert any(
                array.shape == value.shape and np.array_equal(array, value)
                for array in held
            ), name


def free_port():
    """Returns a port that nothing listens at."""
    # Imported late: it imports Keras, which not all users of this module do.
    from keras_tp.backend.processes import supervisor

    return supervisor.free_ports(1)[0]
