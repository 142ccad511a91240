import errno
import os
import pathlib
import random
import signal
import stat
import subprocess
import sys
import time

import h5py
import numpy as np
import pytest

from keras_tp.backend.saving import atomic_files

KILLS = int(os.environ.get("KERAS_TP_KILLS", "12"))
COUNT = 12

# Writes files of one number each, until it is killed. Loads the module alone:
# without Keras, a process starts in a moment.
WRITER = f"""
import importlib.util, itertools, sys
import h5py, numpy
spec = importlib.util.spec_from_file_location("f", {atomic_files.__file__!r})
files = importlib.util.module_from_spec(spec)
spec.loader.exec_module(files)
path, begin, end = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
for value in range(begin, end):
    with files.replaced(path) as new:
        with h5py.File(new, "w") as file:
            for index in range({COUNT}):
                file[str(index)] = numpy.full((32, 32), value, "float32")
                file.flush()
    print(value, flush=True)
"""


def write(path, begin, end):
    return subprocess.Popen(
        [sys.executable, "-c", WRITER, path, str(begin), str(end)],
        stdout=subprocess.PIPE,
        text=True,
    )


def value_of(path):
    """Returns the one number that a file holds."""
    with h5py.File(path) as file:
        held = {float(x) for name in file for x in np.unique(file[name])}
        assert len(file) == COUNT
    (value,) = held
    return value


def test_a_kill_loses_no_file(tmp_path):
    path, draw, value = tmp_path / "a.weights.h5", random.Random(5), 0
    for _ in range(KILLS):
        process = write(path, value, 10**9)
        value = int(process.stdout.readline())
        time.sleep(draw.uniform(0, 0.02))
        process.send_signal(signal.SIGKILL)
        lines = process.communicate()[0].split()
        value = int(lines[-1]) if lines else value
        # What was said to be saved, or the one that was being written.
        assert value_of(path) in (value, value + 1)
        value += 2
        assert len(list(tmp_path.iterdir())) <= 2
    assert write(path, value, value + 1).wait() == 0
    assert value_of(path) == value
    assert list(tmp_path.iterdir()) == [path]


def test_what_another_process_writes_stays(tmp_path):
    path = tmp_path / "a.keras"
    with atomic_files.replaced(path) as first:
        pathlib.Path(first).write_text("first")
        assert write(path, 3, 4).wait() == 0
        assert value_of(path) == 3
    assert path.read_text() == "first"
    assert list(tmp_path.iterdir()) == [path]


def test_an_error_leaves_the_older_file(tmp_path):
    path = tmp_path / "a.h5"
    path.write_text("older")
    with pytest.raises(KeyError):
        with atomic_files.replaced(path) as new:
            pathlib.Path(new).write_text("newer")
            raise KeyError
    assert path.read_text() == "older"
    assert list(tmp_path.iterdir()) == [path]


def test_names_of_links(tmp_path):
    target = tmp_path / "target" / "b.h5"
    target.parent.mkdir()
    target.write_text("older")
    target.chmod(0o640)
    link = tmp_path / "a.h5"
    link.symlink_to(target)
    with atomic_files.replaced(link) as new:
        # Beside the file, in a folder whose name nobody can know before.
        folder = pathlib.Path(new).parent
        assert folder.parent == target.parent
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        pathlib.Path(new).write_text("newer")
    assert link.is_symlink() and target.read_text() == "newer"
    assert stat.S_IMODE(target.stat().st_mode) == 0o640


def fill_disk():
    with open("/dev/full", "w") as file:
        file.write("x")


def fill_disk_of_hdf5():
    raise RuntimeError(
        "Can't decrement id ref count (file write failed: errno = 28, error "
        "message = 'No space left on device')"
    )


@pytest.mark.parametrize("write", [fill_disk, fill_disk_of_hdf5])
@pytest.mark.parametrize("older", [True, False])
def test_a_full_disk(write, older, tmp_path):
    path = tmp_path / "a.weights.h5"
    if older:
        path.write_text("older")
    with pytest.raises(OSError, match="No space is left.*a.weights.h5") as e:
        with atomic_files.replaced(path):
            write()
    assert e.value.errno == errno.ENOSPC
    assert ("The existing file is unchanged." in str(e.value)) == older
    assert [p.read_text() for p in tmp_path.iterdir()] == ["older"] * older


@pytest.mark.skipif(sys.platform != "linux", reason="needs renameat2")
def test_two_folders_are_exchanged(tmp_path):
    for name in ("new", "old"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text(name)
    (tmp_path / "old").chmod(0o750)
    assert atomic_files.exchange(tmp_path / "new", tmp_path / "old")
    assert (tmp_path / "old" / "file").read_text() == "new"
    assert (tmp_path / "new" / "file").read_text() == "old"
    assert stat.S_IMODE((tmp_path / "old").stat().st_mode) == 0o750


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_file_is_on_the_disk_before_it_is_in_place(tmp_path, monkeypatch):
    path = tmp_path / "a.h5"
    done = []

    def fsync(descriptor):
        target = pathlib.Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        done.append(("flush", target.name))
        original(descriptor)

    def replace(new, target):
        done.append(("move", pathlib.Path(new).name))
        move(new, target)

    original, move = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", replace)
    with atomic_files.replaced(path) as new:
        pathlib.Path(new).write_text("newer")
    # The folder is flushed last: it has the new name.
    expected = [("flush", path.name), ("move", path.name)]
    assert done == [*expected, ("flush", tmp_path.name)]
