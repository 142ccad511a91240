"""Finds the line of the user's own code that this process runs."""

import contextlib
import gc
import os
import pathlib
import sys
import sysconfig
import threading
import time

# Installed packages may lie in a folder of the standard library's.
_PACKAGES = (
    *{sysconfig.get_path(name) for name in ("purelib", "platlib")},
    str(pathlib.Path(__file__).resolve().parents[2]),
)
_LIBRARIES = (*_PACKAGES, sysconfig.get_path("stdlib"), "<frozen")
_TENSORFLOW = f"{os.sep}tensorflow{os.sep}"

_LOOKS = threading.Lock()
# A process that is forked starts between two looks: with a garbage collector.
os.register_at_fork(
    before=_LOOKS.acquire,
    after_in_parent=_LOOKS.release,
    after_in_child=_LOOKS.release,
)


class Watch:
    """Tells for how long threads of this process have run the user's code."""

    def __init__(self):
        self._since = None

    def look(self):
        """Returns the line of the user's code, and for how long it has run.

        The time is that since the first of the looks, without a break, that
        found the user's code on top of the stack of the main thread or of a
        thread of the framework: a callback of a compiled program, or a layer
        that runs eagerly. It is 0 for code that called a package, for threads
        that the user started, and for generators that `tf.data` reads ahead of
        a step.

        Returns:
            Pair of the line (empty if there is none) and seconds.
        """
        with _without_garbage_collection():
            line, is_on_top = _look()
        if not is_on_top:
            self._since = None
            return line, 0.0
        now = time.monotonic()
        # Other threads may look, too.
        since = self._since = self._since or now
        return line, now - since


@contextlib.contextmanager
def _without_garbage_collection():
    """Keeps the frames of other threads where they are.

    Python 3.11 makes an object for a frame when it is asked for. If memory for
    the object is what starts the collection of garbage, and code that this
    calls lets other threads run, the function may have returned: the object
    then has the frame of another one, or none, and reading it ends the process.
    From Python 3.12 on, making an object starts no collection.
    """
    with _LOOKS:
        is_enabled = gc.isenabled()
        gc.disable()
        try:
            yield
        finally:
            if is_enabled:
                gc.enable()


def _look():
    """Returns the line of the user's code, and whether it is on top."""
    frames = sys._current_frames()
    main = frames.get(threading.main_thread().ident)
    try:
        for ident in _of_user():
            frames.pop(ident, None)
        for frame in map(_top, frames.values()):
            if frame is not None:
                return _text(frame), True
        return _text(_innermost(main)), False
    finally:
        # One of them is the frame of this function: without this it, and what
        # the others hold, would stay until Python looks for circles.
        del frames, main


def _of_user():
    """Returns the threads that Python code started, without the main one."""
    main = threading.main_thread()
    return [
        thread.ident
        for thread in threading.enumerate()
        if thread is not main and not isinstance(thread, threading._DummyThread)
    ]


def _is_users(frame):
    return not frame.f_code.co_filename.startswith(_LIBRARIES)


def _top(frame):
    """Returns the user's frame that is on top, below the standard library's."""
    while frame is not None and not _is_users(frame):
        if frame.f_code.co_filename.startswith(_PACKAGES):
            return None
        frame = frame.f_back
    caller = frame
    while caller is not None:
        # A step of TensorFlow runs no code of the host; `tf.data` does.
        if _TENSORFLOW in caller.f_code.co_filename:
            return None
        caller = caller.f_back
    return frame


def _innermost(frame):
    """Returns the innermost frame of the user's code; `None` without one."""
    while frame is not None and not _is_users(frame):
        frame = frame.f_back
    return frame


def _text(frame):
    if frame is None:
        return ""
    code = frame.f_code
    return f"{code.co_filename}:{frame.f_lineno} ({code.co_name})"
