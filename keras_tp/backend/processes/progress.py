"""Where this process is, and whether another one is stuck.

All processes run the same program. So each takes the same number of steps
together with the others: batches of `fit`, saves, and whatever else they meet
for. A process that took fewer steps than others, and is in code that needs no
other process, is the one that they wait for. Processes that took equally many
steps compile or compute, and are left alone.
"""

import collections
import contextlib
import math
import os
import sys
import sysconfig
import threading
import time

from keras_tp.backend.processes import timeouts

# How much longer than KERAS_TP_TIMEOUT a wait may be. What has a limit of its
# own ends before, with an error that says more.
GRACE_S = 5.0
# How long a process may wait for one that has ended.
ENDED_S = 2.0
# How long the one that made the communication fail has been silent at least.
SILENT_S = 4.0
# How often a process tells where it is.
BEAT_S = 1.0

# What a process does: run code of its own, take a step with the others, or
# write what the others wait for, as long as it takes.
ALONE, TOGETHER, WRITING = "alone", "together", "writing"
# How it is connected: it runs, left at the end of its script, ended with an
# error, ended without a word, or it is not known.
HERE, LEFT, FAILED, GONE, UNKNOWN = "here", "left", "failed", "gone", "unknown"


class State(
    collections.namedtuple(
        "State",
        ["steps", "place", "kind", "still", "line", "silent", "status"],
        defaults=["", 0.0, HERE],
    )
):
    """Where a process is.

    Args:
        steps: Int, number of steps that it took together with the others.
        place: String, names what it does.
        kind: String, `ALONE`, `TOGETHER` or `WRITING`.
        still: Float, seconds since it went there.
        line: String, the line of the user's code that it runs. Defaults to an
            empty string.
        silent: Float, seconds since it was heard of. Defaults to 0.
        status: String, one of the above, or the error that it failed with.
            Defaults to `HERE`.
    """

    def is_here(self):
        """Returns whether the process has not ended."""
        return self.status == HERE

    def waited(self):
        """Returns the seconds that it has waited for the others."""
        if self.kind == ALONE or self.status != HERE:
            return 0.0
        return self.still + self.silent


class _Own:
    """Where this process is."""

    methods = ()
    steps = 0
    batches = 0
    place = "the script"
    kind = ALONE
    moved = time.monotonic()
    # The last step with the others.
    step = "its start"


STARTING = State(0, "its start", ALONE, 0.0)


def alone(place):
    """Notes that this process runs code that needs no other process.

    Args:
        place: String that names it.
    """
    _Own.place, _Own.kind, _Own.moved = place, ALONE, time.monotonic()


def together(place):
    """Notes that this process takes a step that all processes take.

    Args:
        place: String that names it.
    """
    _Own.steps += 1
    _Own.step = place
    _Own.place, _Own.kind, _Own.moved = place, TOGETHER, time.monotonic()


def source():
    """Notes that this process asks its data source for a batch."""
    alone(f"its data source, after batch {_Own.batches}{_of_method()}")


def end_of_data():
    """Notes that this process has no more batches in this epoch."""
    alone(f"the end of an epoch{_of_method()}")


def batch():
    """Notes that this process has a batch, which all of them compute."""
    _Own.batches += 1
    together(f"batch {_Own.batches}{_of_method()}")


@contextlib.contextmanager
def callback(name):
    """Within it this process runs callbacks.

    Args:
        name: String, the method of the callbacks.
    """
    with _returning():
        alone(f"`{name}` of a callback{_of_method()}")
        yield


@contextlib.contextmanager
def meeting(what):
    """Within it this process waits for the others.

    Args:
        what: String that names what all processes do here.
    """
    with _returning():
        together(f"{what.strip(',')}{_of_method()}")
        yield


@contextlib.contextmanager
def _returning():
    """Afterwards this process is where it was before."""
    place, kind = _Own.place, _Own.kind
    try:
        yield
    finally:
        _Own.place, _Own.kind, _Own.moved = place, kind, time.monotonic()


@contextlib.contextmanager
def method(name):
    """Within it this process runs a method of a model.

    Args:
        name: String, such as `"fit"`.
    """
    outer, batches = _Own.methods, _Own.batches
    place, kind = _Own.place, _Own.kind
    _Own.methods, _Own.batches = (*outer, name), 0
    alone(f"`{name}`")
    try:
        yield
    finally:
        _Own.methods, _Own.batches = outer, batches
        if not outer:
            place, kind = f"the script, after `{name}`", ALONE
        _Own.place, _Own.kind, _Own.moved = place, kind, time.monotonic()


def own_state():
    """Returns the `State` of this process."""
    kind = _Own.kind
    if kind == ALONE and timeouts.is_longer():
        kind = WRITING
    still = time.monotonic() - _Own.moved
    return State(_Own.steps, _Own.place, kind, still, _line())


def failed_state():
    """Returns the `State` of this process, in which a step has failed."""
    kind, place, still = TOGETHER, _Own.step, math.inf
    return own_state()._replace(kind=kind, place=place, still=still)


def fault(states, patience, has_failed=False):
    """Returns what is wrong with a run; `None` if it goes on.

    Args:
        states: Dict of the index of a process to its `State`.
        patience: Float, seconds that processes wait for each other.
        has_failed: Boolean, whether the communication has failed already, and
            the fault explains it. Defaults to `False`.

    Returns:
        Pair of strings, an error and the same in short.
    """
    for index, state in sorted(states.items()):
        found = _fault_of(index, state, states, patience, has_failed)
        if found is not None:
            what, details = found
            rule = (
                " All processes have to run the same program to its end, and "
                f"wait for each other for {patience:g} seconds: what takes "
                "longer needs a larger KERAS_TP_TIMEOUT. Received: "
                f"KERAS_TP_TIMEOUT={patience:g}"
            )
            return f"{what}.{details}{rule}\n", f"{what}.\n"
    return None


def _fault_of(index, state, states, patience, has_failed):
    """Returns how a process holds up the others, in short, and the details."""
    # Of one process after it failed: reports are about a second old.
    least = patience - BEAT_S if has_failed else patience
    silence = min(SILENT_S, least) if has_failed else patience
    longest = least if has_failed else patience + GRACE_S
    others = {i: other for i, other in states.items() if i != index}
    ahead = [i for i, other in others.items() if other.steps > state.steps]
    level = [i for i, other in others.items() if other.steps >= state.steps]

    def waiting_of(indices, seconds):
        return [i for i in indices if others[i].waited() >= seconds]

    if state.status == LEFT:
        held_up = waiting_of(ahead, ENDED_S)
        how = "left with exit code 0"
    elif state.status == GONE:
        held_up = waiting_of(level, ENDED_S)
        how = "has ended without an error, as by `os._exit` or a signal,"
    elif state.status not in (HERE, UNKNOWN):
        held_up = waiting_of(level, ENDED_S)
        how = f"failed ({state.status})"
    elif state.status == HERE and state.silent >= silence:
        held_up = waiting_of(level, silence)
        how = "does not answer, as one that is stopped,"
    elif (
        state.status == HERE
        and state.kind == ALONE
        and state.still + state.silent >= least
    ):
        held_up = waiting_of(ahead, longest)
        how = f"is stuck in {state.place},"
    else:
        return None
    if not held_up:
        return None
    where = ", ".join(f"process {i} at {others[i].place}" for i in held_up)
    what = f"Process {index} {how} while others wait for it: {where}"
    is_named = how.endswith(f"{state.place},")
    details = "" if is_named else f" It was at {state.place}."
    if state.line:
        details += f" The line of its code is {state.line}."
    return what, details


def _of_method():
    return f" in `{_Own.methods[-1]}`" if _Own.methods else ""


_LIBRARIES = (
    *{sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")},
    os.path.dirname(os.path.dirname(os.path.abspath(__file__))),
    "<frozen",
)


def _line():
    """Returns the innermost line of the main thread that is no library's."""
    frame = sys._current_frames().get(threading.main_thread().ident)
    while frame is not None:
        code = frame.f_code
        if not code.co_filename.startswith(_LIBRARIES):
            return f"{code.co_filename}:{frame.f_lineno} ({code.co_name})"
        frame = frame.f_back
    return ""
