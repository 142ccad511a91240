import io
import zipfile

import h5py
import ml_dtypes
import numpy as np
import pytest

from keras_tp.backend.saving import digests
from keras_tp.backend.saving import file_seal

VALUES = {
    "a/kernel": np.arange(6, dtype="float32").reshape(2, 3),
    "a/bias": np.array([np.nan, 1], "float16"),
    "b/count": np.array(3),
    "b/mask": np.array([True, False]),
    "b/half": np.arange(4).astype(ml_dtypes.bfloat16),
    "c/nothing": np.zeros((0, 4)),
    "c/names": np.array(["one", "two"], dtype=object),
}


def write(path, values=None, progress=None):
    with h5py.File(path, "w") as file:
        for name, value in (values or VALUES).items():
            file[name] = value
            digests.note(file[name], value)
        return digests.seal(file, progress)


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "a.weights.h5"
    write(path)
    return path


def check(path):
    with h5py.File(path) as file:
        return digests.check(file)


def test_what_was_written_is_read(path):
    assert check(path) == write(path)
    assert check(path) != write(path, {"a/kernel": np.ones(2)})


def test_a_value_that_was_not_contiguous(tmp_path):
    value = np.arange(6).reshape(2, 3).T
    write(tmp_path / "a.h5", {"a": value})
    assert check(tmp_path / "a.h5")


def test_a_value_of_several_blocks(tmp_path, monkeypatch):
    seal = write(tmp_path / "a.h5", {"a": np.arange(999.0).reshape(9, 111)})
    monkeypatch.setattr(digests, "_BLOCK_BYTES", 2000)
    assert check(tmp_path / "a.h5") == seal


@pytest.mark.parametrize("name", [n for n in VALUES if VALUES[n].size])
def test_a_value_that_was_changed(path, name):
    with h5py.File(path, "a") as file:
        held = file[name]
        if name == "c/names":
            held[0] = b"x"
        else:
            raw = np.array(held[()]).reshape(-1)
            raw.view("uint8")[0] ^= 1
            held[()] = raw.reshape(held.shape)
    with pytest.raises(digests.UnreadableFileError, match=name):
        check(path)


@pytest.mark.parametrize(
    "change",
    [
        lambda file: file.pop("a/bias"),
        lambda file: file.move("a/bias", "a/other"),
        lambda file: file.attrs.pop(digests.SEAL),
        lambda file: file.attrs.create(digests.PROGRESS, '{"epoch": 1}'),
        lambda file: file.create_dataset("a/new", data=np.ones(2)),
        lambda file: file["a/kernel"].attrs.pop(digests.DIGEST),
        lambda file: file["b/half"].attrs.create("dtype", "float16"),
    ],
    ids=[
        *("less", "renamed", "no_seal", "progress", "more"),
        *("no_digest", "dtype"),
    ],
)
def test_a_file_that_was_changed(path, change):
    with h5py.File(path, "a") as file:
        change(file)
    with pytest.raises(digests.UnreadableFileError):
        check(path)


def test_a_file_without_digests(tmp_path):
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as file:
        for name, value in VALUES.items():
            file[name] = value
        # Compressed by others, and by much.
        file.create_dataset("packed", data=np.zeros((999, 999)), chunks=True)
        file.create_dataset(
            "zipped", data=np.zeros((999, 999)), compression="gzip"
        )
    assert check(path) is None


@pytest.mark.parametrize("options", [{}, {"compression": "gzip"}])
def test_more_is_declared_than_stored(tmp_path, options):
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as file:
        file.create_dataset("huge", (10**9, 3), "float32", **options)
    with pytest.raises(ValueError, match=r"(?s)huge.*shape=\(1000000000, 3\)"):
        check(path)


def test_progress(tmp_path):
    path = tmp_path / "a.h5"
    write(path)
    assert digests.progress_of(path) is None
    write(path, progress={"epoch": 3})
    assert check(path) and digests.progress_of(path) == {"epoch": 3}


def test_a_trailer_names_the_file(path):
    size = path.stat().st_size
    digests.check_bytes(path)
    file_seal.append(path)
    digests.check_bytes(path)
    # HDF5 reads it as before.
    assert check(path)
    content = path.read_bytes()
    for count in (1, 50, len(content) - size - 1):
        path.write_bytes(content[:-count])
        with pytest.raises(digests.UnreadableFileError, match=str(path)):
            digests.check_bytes(path)
    for place in (9, size - 9, size + 20, len(content) - 30):
        flipped = bytearray(content)
        flipped[place] ^= 1
        path.write_bytes(flipped)
        with pytest.raises(digests.UnreadableFileError, match=str(path)):
            digests.check_bytes(path)
    # A file that others wrote again has no trailer.
    path.write_bytes(content)
    with h5py.File(path, "a") as file:
        file.attrs["more"] = "x" * 999
    digests.check_bytes(path)
    assert check(path)


def test_a_member_of_an_archive():
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as archive:
        archive.writestr("a", b"0123456789" * 9)
    content = data.getvalue()
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        digests.check_bytes("a", archive)
    content = content.replace(b"0123456789", b"0123456788", 1)
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        with pytest.raises(digests.UnreadableFileError, match="CRC"):
            digests.check_bytes("a", archive)


def test_values_that_are_compared_when_they_are_read(path):
    with h5py.File(path, "a") as file:
        file["a/kernel"][0, 0] = 7
        assert digests.check_seal(file)
        name = digests.check_value(file["a/bias"], file["a/bias"][()])
        with pytest.raises(digests.UnreadableFileError, match="a/kernel"):
            digests.check_value(file["a/kernel"], file["a/kernel"][()])
        with pytest.raises(digests.UnreadableFileError, match="a/kernel"):
            digests.check_rest(file, {name})
        digests.check_rest(file, {"/a/kernel"})
