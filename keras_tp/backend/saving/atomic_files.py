"""Replaces files as a whole, or not at all.

A file is written to a temporary folder beside the file that it replaces,
flushed to the disk, and moved into place. If the process is killed or the disk
is full, the older file stays as it was.
"""

import contextlib
import ctypes
import errno
import os
import pathlib
import re
import shutil
import socket
import tempfile

# Prefix of the temporary folder. Its host and process tell the next save to the
# same path whether it may remove the folder.
_FOLDER = ".{name}.{host}-{process}."
# A quota that is used up is a full disk to its user.
_FULL = (errno.ENOSPC, errno.EDQUOT)
# Values of AT_FDCWD and RENAME_EXCHANGE in Linux.
_HERE, _EXCHANGE = -100, 2


@contextlib.contextmanager
def replaced(path):
    """Yields a path to write to, then moves the new file to `path`.

    Args:
        path: String or path of the file, in a folder that exists. If it is a
            link, the file that it points to is replaced.

    Raises:
        OSError: if the disk is full, with the name of the file.
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
    """Yields a temporary folder to write to, beside a file to replace.

    Also removes the folders of earlier processes that ended while they wrote.
    """
    _remove_leftovers(path)
    prefix = _FOLDER.format(name=path.name, host=_host(), process=os.getpid())
    # Only this user can access this folder, so no other can put a link there.
    folder = pathlib.Path(tempfile.mkdtemp(prefix=prefix, dir=path.parent))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def put(new, path):
    """Moves a flushed file to a path on its disk; replaces a file there."""
    if path.exists():
        shutil.copymode(path, new)
    os.replace(new, path)
    flush(path.parent)


def exchange(new, path):
    """Exchanges two folders in one step, if the system can; returns whether."""
    shutil.copymode(path, new)
    try:
        function = ctypes.CDLL(None, use_errno=True).renameat2
    except AttributeError:
        # Linux only.
        return False
    names = os.fsencode(new), os.fsencode(path)
    is_done = function(_HERE, names[0], _HERE, names[1], _EXCHANGE) == 0
    if is_done:
        flush(path.parent)
    return is_done


def are_others_writing(path):
    """Returns whether another process seems to replace a file right now."""
    own = f"{_host()}-{os.getpid()}"
    return any(
        found.group(1) != own
        for found in map(_folders_of(path).fullmatch, os.listdir(path.parent))
        if found
    )


def _folders_of(path):
    """Returns the pattern of the temporary folders' names for a file."""
    name = re.escape(path.name)
    return re.compile(rf"\.{name}\.(\w+-\d+)\.\w+")


def _host():
    return re.sub(r"[^\w]", "_", socket.gethostname())


def _remove_leftovers(path):
    """Removes the folders of processes of this host that have ended."""
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
        # The process of another user.
        return True
    return True


@contextlib.contextmanager
def full_disk_named(path):
    """Context that adds the file's name to the error of a full disk."""
    try:
        yield
    except (OSError, RuntimeError) as e:
        # HDF5 reports the error number in the message only.
        texts = map(os.strerror, _FULL)
        if getattr(e, "errno", None) not in _FULL and not any(
            text in str(e) for text in texts
        ):
            raise
        kept = "The existing file is unchanged. " if path.exists() else ""
        raise OSError(
            errno.ENOSPC,
            f"No space is left on the disk to write '{path}'. {kept}Free "
            "enough space for the new file beside the existing one, or save to "
            f"another disk. System error: {e}",
        ) from e


def flush(path):
    """Waits until a file, or the entries of a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
