"""Faults while a checkpoint is saved: an error in each process, no loss.

The tests run in one process, and in each of several at once.
"""

import contextlib
import ctypes
import errno
import os
import pathlib
import resource
import shutil
import subprocess
import sys
import tempfile

import keras
import numpy as np
import pytest

from integration_tests import harness
from keras_tp import distribution
from keras_tp.backend import distribution_lib as lib
from keras_tp.backend.saving import atomic_files
from keras_tp.backend.saving import checkpoint_folder
from keras_tp.backend.saving import tensor_files
from keras_tp.distribution import checkpoints

# The kernels of `network` take 1 MiB, so a second save has no space.
DISK_KIB = 1536
LIMIT_BYTES = 2**17
NOBODY = 65534

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="uses limits and users of Linux"
)


def network(value):
    """Returns a model whose numbers are all of one value."""
    model = keras.Sequential(
        [
            keras.Input((256,)),
            keras.layers.Dense(512, use_bias=False, name="up"),
            keras.layers.Dense(256, use_bias=False, name="down"),
        ]
    )
    model.compile("sgd", "mse")
    set_value(model, value)
    return model


def set_value(model, value):
    for variable in model.weights:
        variable.assign(keras.ops.full(variable.shape, float(value)))


def value_in(folder):
    """Loads a checkpoint; returns the one value that all its numbers have."""
    model = network(-1)
    distribution.load_checkpoint(folder, model)
    values = [keras.ops.convert_to_numpy(v) for v in model.weights]
    (value,) = {float(x) for array in values for x in np.unique(array)}
    return value


@pytest.fixture(autouse=True)
def scope():
    shape = harness.fitted((1, 2))
    with distribution.TensorParallel(harness.mesh(shape)).scope():
        yield


@pytest.fixture
def folder():
    """A folder that any user may read, the same in each process."""
    made = None
    if lib.process_id() == 0:
        made = tempfile.mkdtemp(prefix="keras_tp_faults_")
        os.chmod(made, 0o755)
    parent = pathlib.Path(lib.from_first_process(made))
    yield parent / "saved"
    lib.meet("The end of a test")
    if lib.process_id() == 0:
        shutil.rmtree(parent)


@contextlib.contextmanager
def by_first(enter, leave=lambda: None):
    """Context that process 0 makes and ends for all processes."""
    if lib.process_id() == 0:
        enter()
    lib.meet("A fault")
    try:
        yield
    finally:
        lib.meet("The end of a fault")
        if lib.process_id() == 0:
            leave()
        lib.meet("The end of a fault")


@contextlib.contextmanager
def full_disk(folder):
    def leave():
        subprocess.run(["umount", str(folder)], check=True)

    is_mounted = False
    if lib.process_id() == 0:
        folder.mkdir()
        size = f"size={DISK_KIB}k"
        command = ["mount", "-t", "tmpfs", "-o", size, "tmpfs", str(folder)]
        is_mounted = not subprocess.run(command, capture_output=True).returncode
    if not lib.from_first_process(is_mounted):
        pytest.skip("this user cannot mount a disk")
    with by_first(lambda: None, leave):
        yield


@contextlib.contextmanager
def limited_files():
    """Lets the last process write no more than a part of its file."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if lib.process_id() == lib.num_processes() - 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (LIMIT_BYTES, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@contextlib.contextmanager
def read_only(folder):
    """Makes a folder one that the last process can only read."""
    libc = ctypes.CDLL(None)
    is_last = lib.process_id() == lib.num_processes() - 1
    with by_first(lambda: folder.chmod(0o555), lambda: folder.chmod(0o755)):
        # The permissions do not hold for root.
        before = libc.setfsuid(NOBODY) if is_last else None
        try:
            yield
        finally:
            if is_last:
                libc.setfsuid(before)


def assert_refused(folder, model, text):
    """Saves, which has to fail in each process; the path has to be named."""
    with pytest.raises(OSError, match=text) as error:
        distribution.save_checkpoint(folder, model)
    assert str(folder) in str(error.value)
    lib.meet("An error")
    return error.value


def assert_works(folder, value=3):
    distribution.save_checkpoint(folder, network(value))
    assert value_in(folder) == value
    assert len(os.listdir(folder)) == 1 + lib.num_processes()


def test_a_full_disk(folder):
    with full_disk(folder):
        distribution.save_checkpoint(folder, network(1))
        before = sorted(os.listdir(folder))
        error = assert_refused(folder, network(2), "No space is left")
        assert lib.num_processes() > 1 or error.errno == errno.ENOSPC
        assert sorted(os.listdir(folder)) == before
        assert value_in(folder) == 1


def test_a_file_that_is_too_large(folder):
    distribution.save_checkpoint(folder, network(1))
    before = sorted(os.listdir(folder))
    model = network(2)
    with limited_files():
        assert_refused(folder, model, "cannot be written: File too large")
    assert sorted(os.listdir(folder)) == before
    assert value_in(folder) == 1
    assert_works(folder)


@pytest.mark.parametrize("wait", [True, False])
def test_a_folder_that_is_read_only(wait, folder):
    distribution.save_checkpoint(folder, network(1))
    before = sorted(os.listdir(folder))
    model = network(2)
    with read_only(folder):
        # An error now, not in a thread.
        with pytest.raises(OSError, match="cannot be written to.*Permission"):
            distribution.save_checkpoint(folder, model, wait=wait)
    assert sorted(os.listdir(folder)) == before
    assert value_in(folder) == 1
    assert_works(folder)


def removed(folder):
    shutil.rmtree(folder)


def moved(folder):
    folder.rename(folder.with_name("moved"))


def replaced(folder):
    moved(folder)
    folder.mkdir()


def replaced_by_a_file(folder):
    moved(folder)
    folder.write_text("a file")


def first_after(monkeypatch, owner, name, fault):
    """Makes a function of process 0 end with a fault."""
    original = getattr(owner, name)

    def function(*args, **kwargs):
        result = original(*args, **kwargs)
        fault()
        return result

    if lib.process_id() == 0:
        monkeypatch.setattr(owner, name, function)


def first_before(monkeypatch, owner, name, fault):
    """Makes a function of process 0 begin with a fault."""
    original = getattr(owner, name)

    def function(*args, **kwargs):
        fault()
        return original(*args, **kwargs)

    if lib.process_id() == 0:
        monkeypatch.setattr(owner, name, function)


@pytest.mark.parametrize("fault", [moved, replaced, replaced_by_a_file])
def test_a_folder_that_vanishes_while_files_are_written(
    fault, folder, monkeypatch
):
    distribution.save_checkpoint(folder, network(1))
    with monkeypatch.context() as patch:
        first_after(patch, tensor_files, "write", lambda: fault(folder))
        assert_refused(folder, network(2), "was removed or replaced")
    assert value_in(folder.with_name("moved")) == 1


@pytest.mark.parametrize(
    "fault", [removed, moved, replaced, replaced_by_a_file]
)
def test_a_folder_that_vanishes_before_the_index(fault, folder, monkeypatch):
    distribution.save_checkpoint(folder, network(1))
    save = checkpoint_folder.Save
    with monkeypatch.context() as patch:
        first_before(patch, save, "publish", lambda: fault(folder))
        assert_refused(folder, network(2), "was removed or replaced")
    if fault is not removed:
        assert value_in(folder.with_name("moved")) == 1
    if fault is not replaced_by_a_file:
        assert_works(folder)


def test_a_file_that_vanishes_before_the_index(folder, monkeypatch):
    def fault():
        for path in set(folder.glob("*.safetensors")) - before:
            path.unlink()

    distribution.save_checkpoint(folder, network(1))
    before = set(folder.glob("*.safetensors"))
    save = checkpoint_folder.Save
    with monkeypatch.context() as patch:
        first_before(patch, save, "publish", fault)
        assert_refused(folder, network(2), "The file.*was removed or replaced")
    assert value_in(folder) == 1
    assert_works(folder)


def test_an_index_that_has_no_space(folder, monkeypatch):
    def full():
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    distribution.save_checkpoint(folder, network(1))
    with monkeypatch.context() as patch:
        first_before(patch, checkpoint_folder, "_publish", full)
        assert_refused(folder, network(2), "No space is left.*index.json")
    assert value_in(folder) == 1
    assert_works(folder)


def test_an_error_of_a_thread(folder, monkeypatch, capsys):
    """It is printed, and raised by the next call."""
    distribution.save_checkpoint(folder, network(1))
    save = checkpoint_folder.Save
    with monkeypatch.context() as patch:
        first_before(patch, save, "publish", lambda: moved(folder))
        model = network(2)
        distribution.save_checkpoint(folder, model, wait=False)
        # Waits for the thread, whose error it raises.
        assert_refused(folder, model, "was removed or replaced")
    if lib.process_id() == 0:
        assert "was removed or replaced" in capsys.readouterr().err
    assert value_in(folder.with_name("moved")) == 1
    assert_works(folder)


def test_two_runs_that_save_at_the_same_time(folder, monkeypatch):
    """Another run saves when the files of this one are not listed yet."""
    distribution.save_checkpoint(folder, network(1))
    publish = checkpoint_folder.Save.publish
    model, other = network(2), network(3)
    seen = []

    def after_another_run(*args, **kwargs):
        with monkeypatch.context() as patch:
            patch.setattr(checkpoint_folder.Save, "publish", publish)
            # Other runs are told by their host and process.
            patch.setattr(atomic_files, "_host", lambda: "elsewhere")
            distribution.save_checkpoint(folder, other)
            seen.append(value_in(folder))
        return publish(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint_folder.Save, "publish", after_another_run)
        distribution.save_checkpoint(folder, model)
    assert seen == [3]
    assert value_in(folder) == 2
    assert_works(folder, 4)


def test_processes_that_find_different_checkpoints(folder, monkeypatch):
    """As when each machine has a folder of its own."""
    distribution.save_checkpoint(folder, network(1))
    distribution.save_checkpoint(folder.with_name("other"), network(2))
    if lib.num_processes() == 1:
        return
    original, opened = checkpoint_folder.CheckpointFolder, []

    def of_this_process(path):
        # The second process finds the newer one at the second look.
        late = len(opened) < looks and lib.process_id() == 1
        opened.append(late)
        return original(folder.with_name("other") if late else path)

    monkeypatch.setattr(checkpoint_folder, "CheckpointFolder", of_this_process)
    monkeypatch.setattr(checkpoints, "_ATTEMPTS", 3)
    looks = 2
    assert value_in(folder) == 1
    looks = 99
    with pytest.raises(OSError, match="different checkpoints"):
        value_in(folder)
