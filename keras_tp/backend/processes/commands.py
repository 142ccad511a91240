"""The commands that error messages suggest, and the code behind them."""

import builtins
import functools
import os
import runpy
import sys


def in_notebook():
    """Returns whether this process is an IPython kernel or shell."""
    return "ipykernel" in sys.modules or hasattr(builtins, "get_ipython")


def script():
    """Returns this process's script as given, or `"script.py"` without one."""
    given = sys.argv[0]
    is_script = given not in ("", "-", "-c") and not in_notebook()
    return given if is_script else "script.py"


def before_import(device_count, variables):
    """Returns a sentence that says how to get virtual devices in a notebook.

    Args:
        device_count: Int. Number of devices.
        variables: Dict from environment variable to value.
    """
    lines = "; ".join(
        f'os.environ["{name}"] = "{value}"' for name, value in variables.items()
    )
    return (
        f"To use {device_count} virtual CPU devices in a notebook, restart the "
        f"kernel and run this before you import Keras: `import os; {lines}`."
    )


def launch(device_count):
    """Returns the command that runs this script on `device_count` devices."""
    return f"python -m keras_tp.launch --devices {device_count} {script()}"


def run_script(argv, devices=0):
    """Runs a script, with its arguments, as `python SCRIPT` does.

    Its errors, too, look as if it had been started by itself.

    Args:
        argv: List of strings, the script and its arguments.
        devices: Int, the number of devices of the run. A line on stderr says
            at the end if the script did not use them. Defaults to 0: no line.
    """
    sys.argv = list(argv)
    sys.excepthook = functools.partial(_show, sys.excepthook)
    sys.path[0] = os.path.dirname(os.path.abspath(argv[0]))
    try:
        runpy.run_path(argv[0], run_name="__main__")
    except SystemExit as e:
        if not e.code:
            _tell(devices)
        raise
    _tell(devices)


def _tell(devices):
    # A late import, because it imports Keras.
    from keras_tp.backend.processes import unused_devices

    unused_devices.tell(devices)


def _show(excepthook, kind, error, trace):
    shown = trace_of_script(trace)
    # Python's own hook prints the traceback of the error.
    excepthook(kind, error.with_traceback(shown), shown)


def trace_of_script(trace):
    """Returns a traceback without the frames of `run_script` and before."""
    part = trace
    while part is not None:
        if part.tb_frame.f_code is run_script.__code__:
            break
        part = part.tb_next
    while part is not None:
        part = part.tb_next
        if part and part.tb_frame.f_code.co_filename != "<frozen runpy>":
            return part
    return trace
