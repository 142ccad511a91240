"""A folder of safetensors files that several processes write together.

Each process writes one file with its parts of the tensors. The index, a JSON
file with the name that Hugging Face uses, lists the files and the parts; it is
replaced last. Until then it lists the older files, which are removed
afterwards. So a process that is killed leaves the older tensors or the new
ones.
"""

import collections
import contextlib
import json
import math
import os
import pathlib
import re
import shutil
import time

from keras_tp.backend.saving import atomic_files
from keras_tp.backend.saving import boxes
from keras_tp.backend.saving import checkpoint_index
from keras_tp.backend.saving import digests
from keras_tp.backend.saving import tensor_files

INDEX = checkpoint_index.INDEX
_FILE = "model-{token}-{number:05}-of-{count:05}.safetensors"
_FILES = re.compile(r"model-[0-9a-f]{8}-\d{5}-of-\d{5}\.safetensors(\.json)?")
_POLL_S = 0.02
# A process may have 1024 files open, as a rule.
_MOST_OPEN = 256


class Piece(
    collections.namedtuple("Piece", ["name", "shape", "dtype", "box", "read"])
):
    """A part of a tensor that a process writes.

    Args:
        name: String, name of the tensor.
        shape: Tuple of ints, shape of the whole tensor.
        dtype: String, name of its dtype.
        box: Tuple with the start and the end in each dim.
        read: Function that returns the array of the part.
    """

    @property
    def key(self):
        """Name of the part in its file."""
        if all(part == (0, n) for part, n in zip(self.box, self.shape)):
            return self.name
        limits = ",".join(f"{start}:{stop}" for start, stop in self.box)
        return f"{self.name}[{limits}]"

    @property
    def size(self):
        """Shape of the part."""
        return tuple(stop - start for start, stop in self.box)


def file_name(token, process, count):
    """Returns the name of the file of one process.

    Args:
        token: String of eight hexadecimal digits, another one for each save.
        process: Int, index of the process.
        count: Int, number of processes.
    """
    return _FILE.format(token=token, number=process + 1, count=count)


class Save:
    """One save of a folder, in one of its processes.

    After `begin` the processes do not communicate, so that a thread can do the
    rest: each one writes a list of its parts beside its file, and process 0
    reads them. If a method raises, the files of this process are removed.

    Args:
        folder: Path of the folder.
        token: String of eight hexadecimal digits, another one for each save.
        process: Int, index of this process.
        count: Int, number of processes.
    """

    def __init__(self, folder, token, process, count):
        self._folder, self._process = folder, process
        self._names = [file_name(token, i, count) for i in range(count)]
        self._open = contextlib.ExitStack()
        self._beside = None
        self._rows = []

    def begin(self):
        """Marks the folder as in use, and creates it if it does not exist.

        No process may write before process 0 has returned from this: other
        runs remove files of folders that no mark is in.

        Raises:
            OSError: if this process cannot write to the folder.
        """
        folder = self._folder
        if folder.exists() and not folder.is_dir():
            raise NotADirectoryError(
                "A checkpoint is a folder, but there is a file of this name. "
                f"Received: path='{folder}'"
            )
        try:
            folder.mkdir(parents=True, exist_ok=True)
            # The mark is a folder beside the index. Process 0 keeps it until
            # the index lists the new files.
            self._beside = self._open.enter_context(
                atomic_files.folder_beside(folder / INDEX)
            )
        except OSError as e:
            raise OSError(
                e.errno,
                f"A checkpoint cannot be written to '{folder}': {e.strerror}. "
                "Save to a folder that every process can write to.",
            ) from e

    def write(self, pieces):
        """Writes the file of this process.

        Args:
            pieces: List of `Piece`.

        Raises:
            OSError: if the file cannot be written.
        """
        folder, name = self._folder, self._names[self._process]
        with self._undone_on_error(folder / name):
            found = tensor_files.write(
                self._beside / name,
                [(p.key, p.size, p.dtype, p.read) for p in pieces],
            )
            os.replace(self._beside / name, folder / name)
            atomic_files.flush(folder)
            self._rows = [
                [p.name, p.shape, p.dtype, p.key, name, p.box, found[p.key]]
                for p in pieces
            ]
            if self._process:
                self._list_of(name).write_text(json.dumps(self._rows))
                self._open.close()

    def publish(self, described, seconds):
        """Makes the files of all processes the current ones, in process 0.

        Args:
            described: Dict for people, such as the layouts.
            seconds: Number of seconds to wait for the other processes.

        Raises:
            OSError: if process 0 does not see the file of another process, or
                cannot write the index.
        """
        if self._process:
            return
        with self._open, self._undone_on_error(self._folder / INDEX):
            rows, end = self._rows, time.monotonic() + seconds
            for process, name in enumerate(self._names[1:], 1):
                rows += self._rows_of(process, name, end)
            self._check_there(self._names)
            _publish(self._folder, rows, described)

    def abandon(self):
        """Removes the files of this process, unless the index lists them."""
        self._open.close()
        name = self._names[self._process]
        if not self._folder.is_dir():
            return
        if name in _listed(self._folder):
            return
        for path in (self._folder / name, self._list_of(name)):
            # The next save tries again.
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)

    @contextlib.contextmanager
    def _undone_on_error(self, path):
        """Context that names a file in errors, and removes those written."""
        with contextlib.ExitStack() as undone:
            undone.callback(self.abandon)
            try:
                with atomic_files.full_disk_named(path):
                    yield
            except OSError as e:
                self._check_there()
                if e.filename or str(path) in str(e) or e.errno is None:
                    raise
                # The system names no file where a write or a flush fails.
                raise OSError(
                    e.errno, f"'{path}' cannot be written: {e.strerror}."
                ) from e
            undone.pop_all()

    def _check_there(self, names=()):
        """Raises if the marked folder, or a file of it, was taken away."""
        gone = [name for name in names if not (self._folder / name).is_file()]
        if gone or not self._beside.is_dir():
            what = f"The file '{gone[0]}' in" if gone else "The folder"
            raise FileNotFoundError(
                f"{what} '{self._folder}' was removed or replaced while a "
                "checkpoint was written. The checkpoint is not saved."
            )

    def _list_of(self, name):
        return self._folder / f"{name}.json"

    def _rows_of(self, process, name, end):
        """Waits for the list of another process; returns its rows."""
        while True:
            # A part of the list may be there.
            with contextlib.suppress(FileNotFoundError, ValueError):
                return json.loads(self._list_of(name).read_bytes())
            self._check_there()
            if time.monotonic() > end:
                raise FileNotFoundError(
                    f"Process 0 does not see '{self._list_of(name)}', which "
                    f"process {process} writes. Save to a folder that all "
                    "machines share."
                )
            time.sleep(_POLL_S)


def _publish(folder, rows, described):
    """Makes the files of all processes the current ones; removes older ones."""
    tensors = {}
    for name, shape, dtype, key, file, box, digest in rows:
        held = {"dtype": dtype, "shape": shape, "parts": []}
        tensors.setdefault(name, held)["parts"].append(
            {"key": key, "file": file, "box": box, "sha256": digest}
        )
    tensors = dict(sorted(tensors.items()))
    text = checkpoint_index.text_for(tensors, described)
    removed, found = _listed(folder), os.listdir(folder)
    # Other runs that write to this folder have not listed their files yet. They
    # mark it before they write, so look for files first, then for marks.
    if not atomic_files.are_others_writing(folder / INDEX):
        removed |= set(filter(_FILES.fullmatch, found))
    with atomic_files.replaced(folder / INDEX) as new:
        pathlib.Path(new).write_text(text)
    used = {file for _, _, _, _, file, *_ in rows}
    removed |= {f"{file}.json" for file in used}
    for name in removed - used:
        # The new files are current; the next save tries again.
        with contextlib.suppress(OSError):
            (folder / name).unlink(missing_ok=True)


def exists(folder):
    """Returns whether a folder holds a checkpoint."""
    return os.path.isfile(os.path.join(folder, INDEX))


def remove(folder):
    """Removes a folder, and its index first.

    So a process that is killed meanwhile leaves no checkpoint that lacks files.
    """
    if exists(folder):
        os.unlink(os.path.join(folder, INDEX))
        atomic_files.flush(folder)
        shutil.rmtree(folder)


def _listed(folder):
    """Returns the own files that the index lists; none if it is damaged."""
    try:
        listed = json.loads((folder / INDEX).read_bytes())["weight_map"]
        return set(filter(_FILES.fullmatch, listed.values()))
    except digests.READING_ERRORS:
        return set()


class CheckpointFolder:
    """The tensors of a checkpoint, to be read part by part.

    Its files are held open, so that they can be read after another run has
    saved a newer checkpoint to the folder. Of more than 256 files, none is.

    Args:
        path: String or path of the folder.

    Attributes:
        tensors: Dict from a tensor's name to its shape and its dtype's name.
        described: Dict that the save was given.
        sha256: String, digest of the index. Other checkpoints have another.

    Raises:
        UnreadableFileError: if the index or a file is damaged, or if they do
            not belong together. Values are compared by `check` only.
    """

    def __init__(self, path):
        self.path = pathlib.Path(path)
        text = None
        while True:
            last, text = text, checkpoint_index.text_of(self.path)
            try:
                with digests.reading():
                    self._read(text)
                return
            except (FileNotFoundError, digests.UnreadableFileError) as e:
                # If another run has removed a file, there is a newer index.
                if text == last:
                    raise digests.UnreadableFileError(
                        f"The checkpoint in '{self.path}' is damaged. {e}"
                    ) from e

    def _read(self, text):
        added, self.sha256 = checkpoint_index.checked(text, self.path)
        self.described = added["described"]
        self.tensors, self._parts, self._files = {}, {}, {}
        names = {
            part["file"]
            for held in added["tensors"].values()
            for part in held["parts"]
        }
        self._are_held = len(names) <= _MOST_OPEN
        for name, held in added["tensors"].items():
            self._add(name, held)

    def _add(self, name, held):
        shape, dtype = tuple(held["shape"]), held["dtype"]
        parts = []
        for part in held["parts"]:
            box = tuple((int(start), int(stop)) for start, stop in part["box"])
            size = tuple(stop - start for start, stop in box)
            found = self._file(part["file"]).tensors.get(part["key"])
            if found != (size, dtype):
                raise ValueError(
                    f"'{self.path / part['file']}' has to hold "
                    f"{part['key']!r} as {dtype} of shape {size}. Received: "
                    f"{found}"
                )
            parts.append((box, part))
        boxes.check_tiles(name, shape, [box for box, _ in parts])
        self.tensors[name] = shape, dtype
        self._parts[name] = parts

    def _file(self, name):
        if name not in self._files:
            if pathlib.PurePath(name).name != name:
                raise ValueError(
                    "A file must be in the same folder as the index that lists "
                    f"it. Received: {name!r}"
                )
            self._files[name] = tensor_files.TensorFile(
                self.path / name, self._are_held
            )
        return self._files[name]

    def check(self, name, wanted):
        """Compares the parts that overlap with some boxes with their digests.

        Args:
            name: String, name of the tensor.
            wanted: List of boxes.

        Raises:
            UnreadableFileError: if a value differs, with its name and file.
        """
        for box, part in self._parts[name]:
            if boxes.overlap(box, wanted):
                self._check_part(part)

    def check_share(self, names, share):
        """Compares this process's share of some tensors with their digests.

        A process compares the file of its own index, if there are as many files
        as processes. Otherwise all of them compare about as many bytes.

        Args:
            names: List of names of tensors.
            share: Pair: the index of this process, and the number of processes
                that divide the parts among them.

        Raises:
            UnreadableFileError: as `check`.
        """
        index, count = share
        files, taken = sorted(self._files), [0] * count
        for name in names:
            for box, part in self._parts[name]:
                taker = taken.index(min(taken))
                if len(files) == count:
                    taker = files.index(part["file"])
                taken[taker] += math.prod([b - a for a, b in box])
                if taker == index:
                    self._check_part(part)

    def _check_part(self, part):
        file = self._file(part["file"])
        with digests.reading():
            digest = file.digest(part["key"])
        if digest != part["sha256"]:
            raise digests.UnreadableFileError(
                f"The value of {part['key']!r} in "
                f"'{self.path / part['file']}' is not the one that was saved: "
                "its SHA-256 differs."
            )

    @property
    def index(self):
        """Path of the file that lists the others."""
        return self.path / INDEX

    def copy_to(self, target, name, wanted):
        """Copies a box of a tensor into an array of the box's shape."""
        for box, part in self._parts[name]:
            shared = boxes.shared(box, wanted)
            if shared is None:
                continue
            own, there = boxes.within(shared, box), boxes.within(shared, wanted)
            file = self._file(part["file"])
            # The ellipsis makes a view of an array without dims, too.
            file.copy_to(target[(*there, ...)], part["key"], own)
