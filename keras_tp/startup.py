"""Keeps the start-up messages of TensorFlow off the screen of a launched run.

Keras imports TensorFlow on every backend if it is installed, for `tf.data`.
TensorFlow's libraries write to stderr before they read
`TF_CPP_MIN_LOG_LEVEL`, so that variable alone does not hide the messages.

This module is imported before Keras, and imports neither Keras nor a framework.
"""

import functools
import importlib.util
import os
import re
import sys
import tempfile

_LEVEL = "TF_CPP_MIN_LOG_LEVEL"
# Set by the launcher in the processes that it starts.
LAUNCHER = "KERAS_TP_LAUNCHER"
_INFORMATION = re.compile(
    rb"I\d{4} |.* I tensorflow/|To enable the following instructions: "
    rb"|WARNING: All log messages before absl::InitializeLog\(\) is called"
)


def silence_tensorflow():
    """Drops TensorFlow's start-up messages in a launched process.

    If there is an NVIDIA GPU, TensorFlow's warnings and errors are shown.
    `TF_CPP_MIN_LOG_LEVEL=0` shows everything.
    """
    if not _is_launched() or "tensorflow" in sys.modules:
        return
    # Without an NVIDIA driver, TensorFlow logs an error about CUDA: hide it.
    level = "1" if os.path.exists("/dev/nvidiactl") else "3"
    if os.environ.setdefault(_LEVEL, level) != "0":
        sys.meta_path.insert(0, _Finder)


class _Finder:
    """Import finder that loads TensorFlow without its start-up messages."""

    is_searching = False

    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name != "tensorflow" or cls.is_searching:
            return None
        cls.is_searching = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            cls.is_searching = False
        if spec is not None:
            execute = spec.loader.exec_module
            spec.loader.exec_module = functools.partial(_quietly, execute)
        return spec


def _quietly(execute, module):
    sys.stderr.flush()
    kept = os.dup(2)
    with tempfile.TemporaryFile() as said:
        os.dup2(said.fileno(), 2)
        try:
            execute(module)
        finally:
            sys.stderr.flush()
            os.dup2(kept, 2)
            os.close(kept)
            said.seek(0)
            for line in said:
                if not _INFORMATION.match(line):
                    os.write(2, line)


def command():
    """Returns the arguments after this package's command, or `None`.

    The commands are `keras-tp`, `python -m keras_tp` and
    `python -m keras_tp.launch`; the last one is returned as `launch ...`. In
    any other process the result is `None`.
    """
    name, is_module, rest = _started()
    if is_module:
        if name == "keras_tp.launch":
            return ["launch", *rest]
        return rest if name == "keras_tp" else None
    return rest if os.path.basename(name) == "keras-tp" else None


def launches_others():
    """Returns whether this process may start others, and computes nothing.

    That is so for the commands and for `python -m keras_tp.testing`. The
    accelerators are for the processes that they start.
    """
    name, is_module, _ = _started()
    is_ours = is_module and name.partition(".")[0] == "keras_tp"
    return is_ours or command() is not None


def _started():
    """Returns what Python runs, whether it is a module, and its arguments."""
    given = iter(sys.orig_argv[1:])
    for argument in given:
        if argument in ("-W", "-X"):
            next(given, None)
        elif argument == "-m":
            return next(given, ""), True, list(given)
        elif argument == "-c" or not argument.startswith("-"):
            return argument, False, list(given)
    return "", False, []


def _is_launched():
    return LAUNCHER in os.environ or command() is not None


silence_tensorflow()
