"""Files that are replaced as a whole, or not at all.

A file is written in a folder of its own beside the one that it replaces,
flushed to the disk, and put in its place. A process that is killed, or a disk
that is full, leaves the older file as it was.
"""

import contextlib
import errno
import os
import pathlib
import re
import shutil
import socket
import tempfile

# What the next save to the same path may remove: by host and process.
_FOLDER = ".{name}.{host}-{process}."


@contextlib.contextmanager
def replaced(path):
    """Gives a path to write to; what is there then takes the place of a file.

    Args:
        path: String or path of the file, whose folder exists. Of a link, the
            file that it leads to is replaced.

    Raises:
        OSError: if there is no space left, with the name of the file.
    """
    path = pathlib.Path(os.path.realpath(path))
    _remove_leftovers(path)
    prefix = _FOLDER.format(name=path.name, host=_host(), process=os.getpid())
    # A new one that only this user can enter: no link can be put there.
    folder = pathlib.Path(tempfile.mkdtemp(prefix=prefix, dir=path.parent))
    new = folder / path.name
    try:
        with _full_disk_named(path):
            yield str(new)
            _flush(new)
        if path.exists():
            shutil.copymode(path, new)
        os.replace(new, path)
        _flush(path.parent)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _host():
    return re.sub(r"[^\w]", "_", socket.gethostname())


def _remove_leftovers(path):
    """Removes what processes of this host left that ended while they wrote."""
    name, host = re.escape(path.name), re.escape(_host())
    pattern = re.compile(rf"\.{name}\.{host}-(\d+)\.\w+")
    for folder in path.parent.iterdir():
        found = pattern.fullmatch(folder.name)
        if found and not _is_alive(int(found.group(1))):
            shutil.rmtree(folder, ignore_errors=True)


def _is_alive(process):
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        # Another user's.
        return True
    return True


@contextlib.contextmanager
def _full_disk_named(path):
    """Says what a disk without space means for the file that is replaced."""
    try:
        yield
    except (OSError, RuntimeError) as e:
        # HDF5 gives the number of the error in its text only.
        text = os.strerror(errno.ENOSPC)
        if getattr(e, "errno", None) != errno.ENOSPC and text not in str(e):
            raise
        kept = "The older file there is as it was." if path.exists() else ""
        raise OSError(
            errno.ENOSPC,
            f"No space is left on the disk to write '{path}'. {kept} Free "
            "some space, which has to hold the new file beside the older one, "
            f"or save to another disk. As the system says: {e}",
        ) from e


def _flush(path):
    """Waits until a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
