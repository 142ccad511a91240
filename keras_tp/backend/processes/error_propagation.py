"""Ends all processes after an error in one of them, and names that one."""

import atexit
import ctypes
import json
import os
import signal
import sys
import threading
import time
import traceback

from keras_tp import startup
from keras_tp.backend.processes import commands
from keras_tp.backend.processes import heartbeats

# File for the error of a process. The launcher prints the first error last. The
# path may contain environment variables, such as `$RANK`.
ERROR_FILE = "KERAS_TP_ERROR_FILE"
# The number of devices requested, and the process id of the launcher.
DEVICES = "KERAS_TP_DEVICES"
PARENT = startup.LAUNCHER
# Suffix of a second file, with the time when the process began to end.
END = ".end"
_KEY = "keras_tp/first_error"
# Seconds between two checks whether another process failed, and seconds that a
# check takes. A check delays the end of its own process by no more than that.
_POLL_S = 0.5
_LOOK_S = 0.1
# Longest wait for the store to take this process's error, in seconds.
_REPORT_S = 2.0
# Seconds to wait for the cause of a communication error.
_CAUSE_S = 1.5


class _Ending:
    """How this process ends.

    Attributes:
        code: Int. Exit code, `None` while this process has not failed.
        error_file: String. Path of the launcher's file, or `None`.
        errors: Tuple of the errors that another process may have caused.
        fail: Function of an exit code and a message, which tells the others;
            `None` before `together`.
    """

    def reset(self):
        """Returns to the state of a process that has joined no other."""
        self.code = self.error_file = self.fail = None
        self.errors = (RuntimeError,)

    __init__ = reset


_ending = _Ending()


def report_to_launcher():
    """Makes the launcher show an uncaught error of this process.

    Does nothing in a process that no launcher started. Child processes of this
    process report their errors as usual.
    """
    path = os.environ.pop(ERROR_FILE, None)
    if path is None:
        return
    _end_with_launcher()
    _ending.error_file = os.path.expandvars(path)
    sys.excepthook = tell_error


def _end_with_launcher():
    """Makes the system kill this process when its launcher ends."""
    parent = os.environ.get(PARENT)
    if parent is None or not sys.platform.startswith("linux"):
        return
    set_parent_death_signal = 1
    ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)
    if os.getppid() != int(parent):
        sys.exit(f"The launcher, process {parent}, has ended.")


def keep_signals():
    """Restores Python's handling of SIGTERM after a runtime replaced it.

    TensorFlow treats it as a preemption notice, and the process would go on.
    """
    handler = signal.getsignal(signal.SIGTERM)
    is_main = threading.current_thread() is threading.main_thread()
    if is_main and handler is not None:
        signal.signal(signal.SIGTERM, handler)


def note_end():
    """Writes the time when this process began to end, for the launcher.

    Other processes may report its end before the launcher notices it.
    """
    if _ending.error_file:
        with open(_ending.error_file + END, "w") as file:
            file.write(str(time.time()))


def tell(text, summary=None, at=None):
    """Writes an error to the launcher's file, or to stderr without a launcher.

    Args:
        text: String. The error. Ends with a newline.
        summary: String. The error in short. Defaults to `text`.
        at: Float. Time, in seconds since the epoch. Defaults to now.
    """
    if not _ending.error_file:
        sys.stderr.write(text)
        sys.stderr.flush()
        return
    at = at or time.time()
    entry = {"at": at, "text": text, "summary": summary or text}
    with open(_ending.error_file, "a") as file:
        file.write(json.dumps(entry) + "\n")


def tell_error(kind, error, trace):
    """Writes an exception with its traceback, as `sys.excepthook` does."""
    at = time.time()
    _add_cause(error)
    shown = commands.trace_of_script(trace)
    tell(
        "".join(traceback.format_exception(kind, error, shown)),
        "".join(traceback.format_exception_only(kind, error)),
        at,
    )


def explain(error):
    """Adds a note on the other processes to an error that Python will print.

    Does nothing in a process of the launcher, where `tell_error` adds it.
    """
    if not _ending.error_file:
        _add_cause(error)


def _add_cause(error):
    """Adds a note on the other processes to a communication error."""
    if isinstance(error, _ending.errors):
        cause = heartbeats.cause(_CAUSE_S)
        if cause is None and "Timed out" in str(error):
            cause = heartbeats.places()
        if cause is not None:
            error.add_note(cause.rstrip())


def end_now(text, summary=None):
    """Ends this process because of another one, unless it has failed itself."""
    if _ending.code is not None:
        return
    tell(text, summary)
    _flush()
    os._exit(1)


def together(store, put, get, *errors):
    """Makes an uncaught error in one process end every process from now on.

    Args:
        store: `Store` of the run.
        put: Function of a key and bytes. It may raise `RuntimeError` if the
            key exists.
        get: Function of a key and seconds. It raises `TimeoutError`.
        *errors: Error classes of the runtime that another process may have
            caused, in addition to `RuntimeError`.
    """
    _ending.errors += errors
    before = sys.excepthook
    stopped = threading.Event()

    def excepthook(kind, error, trace):
        explain(error)
        before(kind, error, trace)
        first_line = traceback.format_exception_only(kind, error)[-1].strip()
        fail(1, first_line)

    def put_error(message):
        try:
            put(_KEY, f"{store.index} {message}".encode())
        except RuntimeError:
            # Another process failed first, or the store is gone.
            return

    def report(message):
        # While process 0 is stopped, TensorFlow's store waits without limit.
        thread = threading.Thread(
            target=put_error, args=(message,), daemon=True
        )
        thread.start()
        thread.join(_REPORT_S)

    def look():
        while not stopped.wait(_POLL_S):
            try:
                found = get(_KEY, _LOOK_S).decode()
            except TimeoutError:
                continue
            except RuntimeError:
                # The runtime itself ends a process that loses the others.
                return
            index, _, message = found.partition(" ")
            if int(index) != store.index:
                end_now(
                    f"Process {store.index} of {store.count} ends, because "
                    f"process {index} failed: {message}\n"
                )
            return

    def fail(code, message):
        if _ending.code is None:
            _ending.code = code
        report(message)
        heartbeats.leave(message)

    def leave():
        # The watcher must not be inside the runtime while Python ends.
        stopped.set()
        watcher.join()
        if _ending.code is None:
            heartbeats.leave()
            return
        # Otherwise the runtime would wait until the others leave, too.
        _flush()
        if store.index == 0:
            # Process 0 holds the store, where the others read the error.
            time.sleep(1)
        os._exit(_ending.code)

    watcher = threading.Thread(target=look, daemon=True)
    _ending.fail = fail
    sys.excepthook = excepthook
    watcher.start()
    # Runs before the exit handlers of the runtime.
    atexit.register(leave)


def with_code(code):
    """Tells the others that this process ends with a nonzero exit code."""
    if _ending.fail is not None:
        _ending.fail(code, f"it ended with exit code {code}")


def _flush():
    sys.stdout.flush()
    sys.stderr.flush()
