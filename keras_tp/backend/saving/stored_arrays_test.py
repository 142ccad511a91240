import h5py
import ml_dtypes
import numpy as np
import pytest

from keras_tp.backend.saving import stored_arrays


@pytest.fixture
def array():
    return np.random.default_rng(0).normal(size=(6, 5, 8)).astype("float32")


@pytest.fixture
def stored(array, tmp_path):
    path = tmp_path / "array"
    path.write_bytes(b"12345678" + array.tobytes())
    return stored_arrays.of_file(path, 8, array.dtype, array.shape)


VIEWS = {
    "itself": lambda x: x,
    "transposed": lambda x: np.transpose(x, (2, 0, 1)),
    "reshaped": lambda x: np.transpose(np.reshape(x, (6, 40)), (1, 0)),
    "heads": lambda x: np.transpose(np.reshape(x, (2, 3, 5, 8)), (2, 0, 1, 3)),
    "cut": lambda x: x[1:5, ::2],
    "turned": lambda x: x[::-1, :, ::-1],
    "expanded": lambda x: x[:, None],
}


@pytest.mark.parametrize("block", [1, 100, 400, 2**20])
@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_parts_of_views(array, stored, view, block, monkeypatch):
    monkeypatch.setattr(stored_arrays, "_BLOCK_BYTES", block)
    expected, found = view(array), view(stored)
    assert stored_arrays.is_stored(found)
    np.testing.assert_array_equal(stored_arrays.read(found), expected)
    part = (slice(1, 3), slice(0, 1))
    target = np.zeros(expected[part].shape, "float64")
    stored_arrays.copy_to(target, found, part)
    np.testing.assert_array_equal(target, expected[part])


@pytest.mark.parametrize("block", [1, 100, 400, 2**20])
def test_blocks_are_in_the_order_of_the_file(array, stored, block, monkeypatch):
    monkeypatch.setattr(stored_arrays, "_BLOCK_BYTES", block)
    blocks = list(stored_arrays.blocks(stored))
    assert b"".join(b.tobytes() for b in blocks) == array.tobytes()
    assert all(b.nbytes <= max(block, 4) for b in blocks)
    assert not any(map(stored_arrays.is_stored, blocks))


def test_results_of_operations_are_in_memory(array, stored):
    for found, expected in [
        (stored * 2, array * 2),
        (np.transpose(stored).reshape(-1), np.transpose(array).reshape(-1)),
        (np.concatenate([stored, stored]), np.concatenate([array, array])),
        (stored.astype("float16"), array.astype("float16")),
    ]:
        assert not stored_arrays.is_stored(found)
        np.testing.assert_array_equal(found, expected)


def test_a_stored_array_cannot_be_changed(stored):
    with pytest.raises(ValueError, match="read-only"):
        stored[0] = 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "bool"])
def test_datasets(dtype, tmp_path, monkeypatch):
    monkeypatch.setattr(stored_arrays, "_LARGE_BYTES", 0)
    value = np.arange(-6, 6).reshape(3, 4)
    if dtype == "bfloat16":
        value = value.astype(ml_dtypes.bfloat16)
    value = value.astype(dtype)
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("held", data=value)
        if dtype == "bfloat16":
            file["held"].attrs["dtype"] = dtype
    with h5py.File(tmp_path / "a.h5") as file:
        found = stored_arrays.of_dataset(file["held"])
        assert stored_arrays.is_stored(found) and found.dtype == value.dtype
        np.testing.assert_array_equal(stored_arrays.read(found), value)


def made(file, kind):
    value = np.ones((4, 4), ">f4" if kind == "other order" else "<f4")
    if kind == "packed":
        return file.create_dataset("v", data=value, compression="gzip")
    if kind == "empty":
        return file.create_dataset("v", (0, 4))
    return file.create_dataset("v", data=value)


@pytest.mark.parametrize("kind", ["packed", "empty", "other order", "small"])
def test_other_datasets_are_read_whole(kind, tmp_path, monkeypatch):
    if kind != "small":
        monkeypatch.setattr(stored_arrays, "_LARGE_BYTES", 0)
    with h5py.File(tmp_path / "a.h5", "w") as file:
        made(file, kind)
    with h5py.File(tmp_path / "a.h5") as file:
        assert stored_arrays.of_dataset(file["v"]) is None


def test_float_dtypes_become_each_other(stored):
    assert stored_arrays.can_become(stored, "bfloat16")
    assert stored_arrays.can_become(stored, "float32")
    assert not stored_arrays.can_become(stored, "int8")
    assert not stored_arrays.can_become(stored, "float8_e4m3fn")
