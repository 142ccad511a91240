"""Appends a digest to an HDF5 file: of its structure, or of all bytes.

The digest is checked before HDF5 reads the file, because the library may hang
on a file with a damaged structure. HDF5 ignores bytes after its own end of the
file. The structure is all bytes but the values, where these have digests of
their own, in `digests.py`.
"""

import hashlib
import json
import os

import h5py

_BEGIN = b"\nkeras_tp "
# The last bytes are the length of the trailer.
_LENGTH = b" %012d\n"
_LENGTH_BYTES = len(_LENGTH % 0)
_BLOCK_BYTES = 2**20
_SIGNATURE = b"\x89HDF\r\n\x1a\n"
# Offset of the file's length in the HDF5 superblock, by superblock version.
_PLACE_OF_END = {0: 40, 1: 44, 2: 28, 3: 28}


def append(path, with_values=False):
    """Adds the trailer to a closed file: of its structure, or of all bytes."""
    with open(path, "rb+") as file:
        size = file.seek(0, os.SEEK_END)
        values = [] if with_values else _values(path)
        held = {
            "bytes": size,
            "values": values,
            "sha256": _digest(file, size, values),
        }
        text = _BEGIN + json.dumps(held).encode()
        file.seek(size)
        file.write(text + _LENGTH % (len(text) + _LENGTH_BYTES))


def differs(path):
    """Returns whether a file differs from its trailer.

    Without a trailer, a file differs if it is longer than HDF5 says, because
    its trailer was cut.
    """
    with open(path, "rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - _LENGTH_BYTES))
        last = file.read()
        if not last[1:-1].isdigit() or _LENGTH % int(last[1:-1]) != last:
            return _goes_on(file, size)
        file.seek(max(0, size - int(last[1:-1])))
        text = file.read()[:-_LENGTH_BYTES]
        if not text.startswith(_BEGIN):
            return _goes_on(file, size)
        try:
            held = json.loads(text.removeprefix(_BEGIN))
            size, values, digest = (
                held[name] for name in ("bytes", "values", "sha256")
            )
            return digest != _digest(file, size, values)
        except (ValueError, TypeError, LookupError, RecursionError):
            # The trailer itself is damaged.
            return True


def _goes_on(file, size):
    """Returns whether a file is longer than HDF5 says, by a cut trailer."""
    file.seek(0)
    head = file.read(64)
    if len(head) < 64 or not head.startswith(_SIGNATURE):
        return False
    place = _PLACE_OF_END.get(head[len(_SIGNATURE)])
    if place is None:
        return False
    return size > int.from_bytes(head[place : place + 8], "little")


def _values(path):
    """Returns the locations of a file's values: pairs of offset and size."""
    found = []

    def add(name, item):
        # Values that are not in one piece have no offset.
        if isinstance(item, h5py.Dataset):
            offset = item.id.get_offset()
            if offset is not None:
                found.append([offset, item.id.get_storage_size()])

    with h5py.File(path) as file:
        file.visititems(add)
    return sorted(found)


def _digest(file, size, values):
    digest = hashlib.sha256(json.dumps([size, values]).encode())
    start = 0
    for offset, count in [*values, [size, 0]]:
        file.seek(start)
        while start < offset:
            block = file.read(min(offset - start, _BLOCK_BYTES))
            if not block:
                raise ValueError(f"The file ends at {start} of {size} bytes.")
            digest.update(block)
            start += len(block)
        start = offset + count
    return digest.hexdigest()
