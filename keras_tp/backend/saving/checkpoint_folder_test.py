import contextlib
import json
import os
import pathlib
import random
import signal
import sys
import time

import numpy as np
import pytest
import safetensors

from keras_tp.backend.saving import atomic_files
from keras_tp.backend.saving import checkpoint_folder
from keras_tp.backend.saving import checkpoint_index
from keras_tp.backend.saving import digests
from keras_tp.backend.saving import tensor_files

INDEX = checkpoint_folder.INDEX
COUNT = 2
SHAPES = {"a": (4, 6), "b": (3,), "step": ()}


def value_of(name, number):
    size = int(np.prod(SHAPES[name]))
    return np.arange(size, dtype="float32").reshape(SHAPES[name]) + number


def pieces_of(process, number):
    """The pieces of a process: half of `a`, and one of the others."""
    boxes = {"a": ((0, 4), (3 * process, 3 * process + 3))}
    boxes |= {"b": ((0, 3),)} if process else {"step": ()}
    pieces = []
    for name, box in boxes.items():
        value = value_of(name, number)[tuple(slice(*part) for part in box)]
        pieces.append(
            checkpoint_folder.Piece(
                name, SHAPES[name], "float32", box, lambda value=value: value
            )
        )
    return pieces


def begun(folder, token, process):
    save = checkpoint_folder.Save(folder, token, process, COUNT)
    save.begin()
    return save


def write(folder, number, token="01234567"):
    """Writes the parts of all processes, process 0 last."""
    for process in reversed(range(COUNT)):
        save = begun(folder, token, process)
        save.write(pieces_of(process, number))
        save.publish({"number": number}, seconds=5)


def read(folder):
    """Returns the number that was written; all values have to be of it."""
    found = checkpoint_folder.CheckpointFolder(folder)
    number = found.described["number"]
    assert set(found.tensors) == set(SHAPES)
    for name, shape in SHAPES.items():
        box = tuple((0, size) for size in shape)
        found.check(name, [box])
        value = np.empty(shape, "float32")
        found.copy_to(value, name, box)
        np.testing.assert_array_equal(value, value_of(name, number))
    return number


@pytest.fixture
def folder(tmp_path):
    write(tmp_path / "saved", 1)
    return tmp_path / "saved"


def files(folder):
    return sorted(path.name for path in folder.glob("*.safetensors"))


def test_any_box_is_read(folder):
    found = checkpoint_folder.CheckpointFolder(folder)
    value = np.empty((2, 4), "float32")
    found.copy_to(value, "a", ((1, 3), (1, 5)))
    np.testing.assert_array_equal(value, value_of("a", 1)[1:3, 1:5])


@pytest.mark.parametrize("count", [2, 3, 8])
def test_processes_divide_the_comparison(count, folder, monkeypatch):
    compared, original = [], tensor_files.TensorFile.digest

    def noted(self, key):
        compared.append((self._path.name, key))
        return original(self, key)

    monkeypatch.setattr(tensor_files.TensorFile, "digest", noted)
    found, shares = checkpoint_folder.CheckpointFolder(folder), []
    for index in range(count):
        compared.clear()
        found.check_share(list(SHAPES), (index, count))
        shares.append([*compared])
    together = sorted(part for share in shares for part in share)
    index = json.loads((folder / INDEX).read_text())["weight_map"]
    assert together == sorted((file, key) for key, file in index.items())
    if count == COUNT:
        # Each has read its own file anyway.
        for share, file in zip(shares, files(folder)):
            assert {name for name, _ in share} == {file}


def test_one_process_finds_the_damage_of_all(folder):
    (path, *_) = folder.glob("*.safetensors")
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    found, refused = checkpoint_folder.CheckpointFolder(folder), []
    for index in range(3):
        try:
            found.check_share(list(SHAPES), (index, 3))
        except digests.UnreadableFileError as e:
            refused.append(str(e))
    assert len(refused) == 1 and path.name in refused[0]


@pytest.mark.parametrize("dtype", tensor_files._NAMES)
def test_the_library_reads_what_was_written(dtype, tmp_path):
    value = np.array([[0, 1, 1], [1, 0, 1]])
    value = value.astype(tensor_files.numpy_dtype(dtype))
    path = tmp_path / "a.safetensors"
    tensor_files.write(path, [("x", (2, 3), dtype, lambda: value)])
    own = np.empty_like(value)
    tensor_files.TensorFile(path).copy_to(own, "x", (slice(None),) * 2)
    np.testing.assert_array_equal(own, value)
    with safetensors.safe_open(path, "numpy") as file:
        held = file.get_slice("x")
        assert held.get_shape() == [2, 3]
        assert held.get_dtype() == tensor_files._NAMES[dtype]
        # The library has no float8 in numpy.
        if "float8" not in dtype:
            np.testing.assert_array_equal(file.get_tensor("x"), value)


def test_the_index_is_that_of_hugging_face(folder):
    index = json.loads((folder / INDEX).read_text())
    for key, name in index["weight_map"].items():
        with safetensors.safe_open(folder / name, "numpy") as file:
            assert key in file.keys()
    sizes = [4 * int(np.prod(shape)) for shape in SHAPES.values()]
    assert index["metadata"]["total_size"] == sum(sizes)


def test_a_new_save_replaces_the_old_one(folder):
    write(folder, 2, token="89abcdef")
    assert read(folder) == 2
    assert sorted(os.listdir(folder)) == sorted([INDEX, *files(folder)])
    assert len(files(folder)) == COUNT


def changed_index(folder, change, sealed=True):
    """Changes the index; with a new digest, as its author could."""
    path = folder / INDEX
    index = json.loads(path.read_text())
    change(index["metadata"]["keras_tp"], index)
    added = index["metadata"]["keras_tp"]
    if sealed:
        added.pop("sha256")
        added["sha256"] = digests.digest_of_json(added)
        index["weight_map"] = {
            part["key"]: part["file"]
            for held in added["tensors"].values()
            for part in held["parts"]
        }
    path.write_text(json.dumps(index))


def first_part(added):
    return added["tensors"]["a"]["parts"][0]


def header_changed(path, change):
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(
        len(text).to_bytes(8, "little") + text + data[8 + length :]
    )


def missing_part(folder):
    (folder / files(folder)[0]).unlink()


def swapped_parts(folder):
    first, second = (folder / name for name in files(folder))
    kept = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(kept)


def truncated(folder):
    path = folder / files(folder)[0]
    path.write_bytes(path.read_bytes()[:-4])


def flipped(folder):
    path = folder / files(folder)[0]
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def other_save(folder):
    """The file of another save, under the name of this one."""
    kept = (folder / files(folder)[0]).name
    write(folder.parent / "other", 2)
    (folder / kept).write_bytes((folder.parent / "other" / kept).read_bytes())


def other_version(folder):
    changed_index(folder, lambda added, _: added.update(format=99))


def duplicate_names(folder):
    path = folder / INDEX
    text = path.read_text()
    path.write_text(text.replace('"tensors": {', '"tensors": {"a": 1,'))


def overlapping(folder):
    changed_index(
        folder, lambda added, _: first_part(added).update(box=[[0, 4], [2, 5]])
    )


def overlapping_in_the_file(folder):
    def change(header):
        for held in header.values():
            held["data_offsets"] = [0, held["data_offsets"][1]]

    header_changed(folder / files(folder)[0], change)


def huge(folder):
    def change(header):
        for held in header.values():
            held["shape"] = [2**40, 3]

    header_changed(folder / files(folder)[0], change)


def huge_in_the_index(folder):
    changed_index(
        folder, lambda added, _: added["tensors"]["a"].update(shape=[2**60, 6])
    )


def path_escape(folder):
    (folder.parent / "x.safetensors").write_bytes(
        (folder / files(folder)[0]).read_bytes()
    )
    changed_index(
        folder,
        lambda added, _: first_part(added).update(file="../x.safetensors"),
    )


def link(folder):
    path = folder / files(folder)[0]
    path.rename(folder / "elsewhere")
    path.symlink_to(folder / "elsewhere")


def wrong_dtype(folder):
    changed_index(
        folder, lambda added, _: added["tensors"]["a"].update(dtype="int32")
    )


def wrong_layout(folder):
    def change(added, _):
        a, b = added["tensors"]["a"]["parts"]
        a["box"], b["box"] = b["box"], a["box"]

    changed_index(folder, change, sealed=False)


def no_index_of_keras_tp(folder):
    changed_index(folder, lambda _, index: index.update(metadata={}), False)


def not_json(folder):
    (folder / INDEX).write_text("[" * 100000)


@pytest.mark.parametrize(
    "damage",
    [
        *(missing_part, swapped_parts, truncated, flipped, other_save),
        *(other_version, duplicate_names, overlapping, huge),
        *(overlapping_in_the_file, huge_in_the_index, path_escape, link),
        *(wrong_dtype, wrong_layout, not_json),
    ],
)
def test_damage_is_named(damage, folder):
    damage(folder)
    with pytest.raises(digests.UnreadableFileError) as error:
        read(folder)
    assert str(folder) in str(error.value)


def test_a_folder_without_an_index_is_no_checkpoint(tmp_path):
    with pytest.raises(FileNotFoundError, match=INDEX):
        checkpoint_folder.CheckpointFolder(tmp_path)


@pytest.mark.parametrize(
    "count", [150, pytest.param(10000, marks=pytest.mark.slow)]
)
def test_no_flipped_bit_is_silent(count, folder):
    draw = random.Random(0)
    paths, found = [folder / name for name in (INDEX, *files(folder))], 0
    for _ in range(count):
        path = draw.choice(paths)
        data = path.read_bytes()
        place, bit = draw.randrange(len(data)), draw.randrange(8)
        flipped = bytearray(data)
        flipped[place] ^= 1 << bit
        path.write_bytes(flipped)
        try:
            # The values are those that were saved, or it is an error. In the
            # index a space, or the length of all values, may have changed.
            assert read(folder) == 1, (path, place, bit)
        except (digests.UnreadableFileError, FileNotFoundError):
            found += 1
        path.write_bytes(data)
    assert found > 0.8 * count


@pytest.mark.parametrize(
    "count", [30, pytest.param(1000, marks=pytest.mark.slow)]
)
def test_a_kill_leaves_the_old_tensors_or_the_new_ones(count, tmp_path):
    folder, draw = tmp_path / "saved", random.Random(0)
    write(folder, 0)
    start = time.perf_counter()
    write(folder, 0)
    seconds, last = time.perf_counter() - start, 0
    for number in range(1, count + 1):
        child = os.fork()
        if not child:
            try:
                write(folder, number, token=f"{number:08x}")
            finally:
                os._exit(0)
        time.sleep(draw.random() * 1.5 * seconds)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        found = read(folder)
        assert found in (last, number)
        last = found
    write(folder, count + 1, token="ffffffff")
    assert read(folder) == count + 1
    assert sorted(os.listdir(folder)) == sorted([INDEX, *files(folder)])
    assert len(files(folder)) == COUNT


def test_another_run_keeps_its_files(folder):
    save = begun(folder, "22222222", 1)
    other = begun(folder, "22222222", 0)
    save.write(pieces_of(1, 2))
    with atomic_files.folder_beside(folder / INDEX) as beside:
        # Stands for process 0 of that run, on another host.
        in_use = beside.rename(
            folder / f".{INDEX}.elsewhere-1.{beside.name[-8:]}"
        )
        write(folder, 3, token="33333333")
        assert read(folder) == 3
        in_use.rmdir()
    other.write(pieces_of(0, 2))
    other.publish({"number": 2}, seconds=5)
    assert read(folder) == 2


def test_another_run_that_begins_while_this_one_looks(folder, monkeypatch):
    other = [
        checkpoint_folder.Save(folder, "66666666", i, COUNT)
        for i in range(COUNT)
    ]
    original = atomic_files.are_others_writing

    def begins_after_the_answer(path):
        answer = original(path)
        for process, save in enumerate(other):
            save.begin()
            save.write(pieces_of(process, 2))
        return answer

    with monkeypatch.context() as patch:
        name = "are_others_writing"
        patch.setattr(atomic_files, name, begins_after_the_answer)
        write(folder, 3, token="77777777")
    assert read(folder) == 3
    other[0].publish({"number": 2}, seconds=5)
    assert read(folder) == 2


def held_open(folder):
    """Returns the names of files of a folder that this process has open."""
    found = []
    for path in pathlib.Path("/proc/self/fd").glob("*"):
        # The one that lists these is gone.
        with contextlib.suppress(FileNotFoundError):
            found.append(os.readlink(path))
    return [name for name in found if str(folder) in name]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_what_is_open_is_read_after_another_save(folder):
    found = checkpoint_folder.CheckpointFolder(folder)
    write(folder, 2, token="88888888")
    for name, shape in SHAPES.items():
        box = tuple((0, size) for size in shape)
        found.check(name, [box])
        value = np.empty(shape, "float32")
        found.copy_to(value, name, box)
        np.testing.assert_array_equal(value, value_of(name, 1))
    assert len(held_open(folder)) == COUNT
    del found
    assert not held_open(folder)


def test_files_are_not_held_if_they_are_many(folder, monkeypatch):
    monkeypatch.setattr(checkpoint_folder, "_MOST_OPEN", 1)
    assert read(folder) == 1


def test_an_index_that_changes_while_it_is_read(folder, monkeypatch):
    original = checkpoint_index.text_of
    tokens = iter(["99999999"])

    def text_before_another_save(path):
        text = original(path)
        for token in tokens:
            write(folder, 2, token)
        return text

    monkeypatch.setattr(checkpoint_index, "text_of", text_before_another_save)
    assert read(folder) == 2


def test_a_failed_save_leaves_the_old_one(folder, monkeypatch):
    def fails(*args):
        raise OSError(28, os.strerror(28))

    before = sorted(os.listdir(folder))
    save = begun(folder, "44444444", 0)
    monkeypatch.setattr(tensor_files, "write", fails)
    with pytest.raises(OSError, match="No space"):
        save.write(pieces_of(0, 2))
    assert sorted(os.listdir(folder)) == before
    assert read(folder) == 1


def test_a_folder_that_is_not_shared_is_named(folder):
    save = begun(folder, "55555555", 0)
    save.write(pieces_of(0, 2))
    with pytest.raises(FileNotFoundError, match="all machines share"):
        save.publish({}, seconds=0)
    assert read(folder) == 1
