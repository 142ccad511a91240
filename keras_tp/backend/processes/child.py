"""Joins the other processes of a run, and then runs a script.

    python -m keras_tp.backend.processes.child SCRIPT [ARGUMENTS]

`keras_tp.launch` starts this module in each process. The script may call
`keras_tp.distribution.initialize`, but does not have to.
"""

import os
import sys

from keras_tp.backend.processes import commands
from keras_tp.backend.processes import error_propagation
from keras_tp.backend.processes import supervisor


def main(argv):
    """Runs a script with its arguments."""
    error_propagation.report_to_launcher()
    # A late import, because Keras and its backend take seconds to import.
    from keras_tp import backend

    lib = backend.distribution_lib
    lib.initialize(*supervisor.place_in_run())
    wanted = int(os.environ.get(error_propagation.DEVICES, 0))
    found = lib.list_devices()
    if len(found) < wanted:
        raise ValueError(
            f"The run needs {wanted} devices, but its processes have "
            f"{len(found)}: {found}. Set `--devices` to {len(found)}. To use "
            "virtual CPU devices instead, hide the accelerators."
        )
    try:
        is_first = lib.process_id() == 0
        commands.run_script(argv, wanted if is_first else 0)
    except SystemExit as e:
        code = 0 if e.code is None else e.code
        if not isinstance(code, int):
            error_propagation.tell(f"{code}\n")
            code = 1
        if code != 0:
            error_propagation.note_end()
            error_propagation.with_code(code)
        raise


if __name__ == "__main__":
    main(sys.argv[1:])
