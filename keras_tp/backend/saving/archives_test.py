import io
import os
import zipfile
import zlib

import h5py
import numpy as np
import pytest

from keras_tp.backend.saving import archives


@pytest.mark.parametrize(
    "first, second", [(0, 0), (5, 0), (0, 7), (10, 3), (1000, 12345)]
)
def test_combined_crc(first, second):
    text = np.random.default_rng(0).bytes(first + second)
    found = archives.combined_crc(
        zlib.crc32(text[:first]), zlib.crc32(text[first:]), second
    )
    assert found == zlib.crc32(text)


@pytest.fixture
def path(tmp_path):
    held = io.BytesIO()
    with h5py.File(held, "w") as file:
        file["a"] = np.arange(1000.0)
    path = tmp_path / "m.keras"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("config.json", "{}")
        archive.writestr("model.weights.h5", held.getvalue())
    return path


def test_a_part_reads_as_a_file(path):
    with zipfile.ZipFile(path) as archive:
        text = archive.read("model.weights.h5")
        part = archives.stored_part(archive)
    with part:
        assert part.read() == text and part.read() == b""
        assert part.seek(10) == 10 and part.read(5) == text[10:15]
        assert part.seek(-3, os.SEEK_END) == len(text) - 3
        assert part.read(9) == text[-3:]
        assert part.seek(len(text) + 5) and part.read(1) == b""
        with h5py.File(part) as file:
            np.testing.assert_array_equal(file["a"], np.arange(1000.0))


def test_weights_are_compared_with_their_checksum(path):
    assert archives.check(path, (0, 1))
    text = bytearray(path.read_bytes())
    text[len(text) // 2] ^= 4
    path.write_bytes(text)
    with pytest.raises(zipfile.BadZipFile, match="CRC-32"):
        archives.check(path, (0, 1))


def test_other_files_are_left_alone(path, tmp_path):
    assert not archives.check(tmp_path / "missing.keras", (0, 1))
    assert not archives.check(tmp_path, (0, 1))
    assert not archives.check(io.BytesIO(), (0, 1))
    other = tmp_path / "m.zip"
    other.write_bytes(path.read_bytes())
    assert not archives.check(other, (0, 1))
    with zipfile.ZipFile(path, "a") as archive:
        assert archives.stored_part(archive, "other") is None
        archive.writestr("packed", "0" * 99, zipfile.ZIP_DEFLATED)
        assert archives.stored_part(archive, "packed") is None
    with zipfile.ZipFile(io.BytesIO(path.read_bytes())) as archive:
        assert archives.stored_part(archive) is None


def test_a_damaged_header_is_an_error(path):
    text = path.read_bytes()
    second = text.index(b"PK\3\4", 4)
    for place, byte in [(second, 1), (second + 28, 255)]:
        damaged = bytearray(text)
        damaged[place] = byte
        path.write_bytes(damaged)
        with zipfile.ZipFile(path) as archive:
            with pytest.raises(zipfile.BadZipFile, match="Bad header"):
                archives.stored_part(archive)
