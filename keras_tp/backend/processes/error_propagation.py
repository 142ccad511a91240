"""An error of one process ends all of them, and they say whose it was."""

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

# Where a launcher looks for the error of a process, to print the first one
# last. The path may have environment variables in it, such as `$RANK`.
ERROR_FILE = "KERAS_TP_ERROR_FILE"
# How many devices the launcher was asked for, and the id of its process.
DEVICES = "KERAS_TP_DEVICES"
PARENT = startup.LAUNCHER
# Of the file beside that of the error with the time when a process ended.
END = ".end"
_KEY = "keras_tp/first_error"
# How often a process looks whether another one failed, and how long it looks:
# it holds up its own end by no more than that.
_POLL_S = 0.5
_LOOK_S = 0.1
# How long an error of the communication waits for news of its cause.
_CAUSE_S = 1.5
_code = []
_error_file = []
# Errors that may be due to another process.
_communication_errors = [RuntimeError]


def report_to_launcher():
    """Has the uncaught error of this process shown by its launcher.

    Does nothing in a process that no launcher started. What this process
    starts itself reports as usual.
    """
    path = os.environ.pop(ERROR_FILE, None)
    if path is None:
        return
    _end_with_launcher()
    _error_file.append(os.path.expandvars(path))
    sys.excepthook = tell_error


def _end_with_launcher():
    """Has this process killed when the one that started it is."""
    parent = os.environ.get(PARENT)
    if parent is None or not sys.platform.startswith("linux"):
        return
    set_parent_death_signal = 1
    ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)
    if os.getppid() != int(parent):
        sys.exit(f"The launcher, process {parent}, has ended.")


def keep_signals():
    """Has SIGTERM do what it does in Python, whatever a runtime made of it.

    TensorFlow takes it for a notice, and the process would go on.
    """
    handler = signal.getsignal(signal.SIGTERM)
    is_main = threading.current_thread() is threading.main_thread()
    if is_main and handler is not None:
        signal.signal(signal.SIGTERM, handler)


def note_end():
    """Notes when this process began to end, for the launcher.

    The others may report that it is gone before it is.
    """
    if _error_file:
        with open(_error_file[0] + END, "w") as file:
            file.write(str(time.time()))


def tell(text, summary=None, at=None):
    """Writes an error where it is read: for the launcher, or to stderr.

    Args:
        text: String, ends with a newline.
        summary: String, says the same in short. Defaults to the text.
        at: Float, when it was, in seconds since the epoch. Defaults to now.
    """
    if not _error_file:
        sys.stderr.write(text)
        sys.stderr.flush()
        return
    at = at or time.time()
    entry = {"at": at, "text": text, "summary": summary or text}
    with open(_error_file[0], "a") as file:
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


def _add_cause(error):
    """Names the process that made the communication of this one fail."""
    if isinstance(error, tuple(_communication_errors)):
        cause = heartbeats.cause(_CAUSE_S)
        if cause is not None:
            error.add_note(cause.rstrip())


def end_now(text, summary):
    """Ends this process because of another one, whatever it does.

    Args:
        text: String, the error; ends with a newline.
        summary: String, says the same in short.
    """
    if _code:
        return
    tell(text, summary)
    _flush()
    os._exit(1)


def together(store, put, get, *errors):
    """From now on an uncaught error in one process ends every process.

    Args:
        store: `Store` of the run.
        put: Function of a key and bytes, which may raise `RuntimeError` if
            there is such a key.
        get: Function of a key and seconds; raises `TimeoutError`.
        *errors: Classes of the runtime's errors that may be due to another
            process, beside `RuntimeError`.
    """
    _communication_errors.extend(errors)
    before = sys.excepthook
    stopped = threading.Event()

    def excepthook(kind, error, trace):
        before(kind, error, trace)
        first_line = traceback.format_exception_only(kind, error)[-1].strip()
        fail(1, first_line)

    def report(message):
        try:
            put(_KEY, f"{store.index} {message}".encode())
        except RuntimeError:
            # Another process was first, or the store is gone.
            return

    def look():
        while not stopped.wait(_POLL_S):
            try:
                found = get(_KEY, _LOOK_S).decode()
            except TimeoutError:
                continue
            except RuntimeError:
                # The runtime itself ends a process that lost the others.
                return
            index, _, message = found.partition(" ")
            if _code or int(index) == store.index:
                return
            tell(
                f"Process {store.index} of {store.count} ends, because "
                f"process {index} failed: {message}\n"
            )
            _flush()
            os._exit(1)

    def fail(code, message):
        _code.append(code)
        report(message)
        heartbeats.leave(message)

    def leave():
        # Not within the runtime while Python ends.
        stopped.set()
        watcher.join()
        if not _code:
            heartbeats.leave()
            return
        # Or else the runtime would wait for the others to leave, too.
        _flush()
        if store.index == 0:
            # Holds the store, from which the others learn of the error.
            time.sleep(1)
        os._exit(_code[0])

    watcher = threading.Thread(target=look, daemon=True)
    _fail.append(fail)
    sys.excepthook = excepthook
    watcher.start()
    # Before what the runtime registered.
    atexit.register(leave)


_fail = []


def with_code(code):
    """Says that this process ends with an exit code that is not 0."""
    for fail in _fail:
        fail(code, f"it ended with exit code {code}")


def _flush():
    sys.stdout.flush()
    sys.stderr.flush()
