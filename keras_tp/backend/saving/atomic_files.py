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
    with folder_beside(path) as folder:
        new = folder / path.name
        with full_disk_named(path):
            yield str(new)
            flush(new)
        put(new, path)


@contextlib.contextmanager
def folder_beside(path):
    """Gives a folder to write to, which goes at the end.

    What earlier processes left that ended while they wrote goes as well.

    Args:
        path: `pathlib.Path` of the file that is to be replaced.
    """
    _remove_leftovers(path)
    prefix = _FOLDER.format(name=path.name, host=_host(), process=os.getpid())
    # A new one that only this user can enter: no link can be put there.
    folder = pathlib.Path(tempfile.mkdtemp(prefix=prefix, dir=path.parent))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def put(new, path):
    """Puts a file that was flushed in the place of another one.

    Args:
        new: `pathlib.Path` of the file, on the same disk.
        path: `pathlib.Path` that it is to have, of a file or not yet of one.
    """
    if path.exists():
        shutil.copymode(path, new)
    os.replace(new, path)
    flush(path.parent)


def are_others_writing(path):
    """Returns whether somebody else writes what is to replace a file.

    Args:
        path: `pathlib.Path` of the file.
    """
    own = f"{_host()}-{os.getpid()}"
    return any(
        found.group(1) != own
        for found in map(_folders_of(path).fullmatch, os.listdir(path.parent))
        if found
    )


def _folders_of(path):
    """Returns the pattern of the folders in which a file is written."""
    name = re.escape(path.name)
    return re.compile(rf"\.{name}\.(\w+-\d+)\.\w+")


def _host():
    return re.sub(r"[^\w]", "_", socket.gethostname())


def _remove_leftovers(path):
    """Removes what processes of this host left that ended while they wrote."""
    pattern = _folders_of(path)
    for folder in path.parent.iterdir():
        found = pattern.fullmatch(folder.name)
        if not found:
            continue
        host, _, process = found.group(1).rpartition("-")
        if host == _host() and not _is_alive(int(process)):
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
def full_disk_named(path):
    """Says what a disk without space means for the file that is replaced.

    Args:
        path: `pathlib.Path` of the file.
    """
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


def flush(path):
    """Waits until a file, or the names in a folder, are on the disk.

    Args:
        path: String or path.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
