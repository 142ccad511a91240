"""Tracks the position of this process in the program, and finds stuck ones.

All processes run the same program, so all of them take the same number of
common steps: batches of `fit`, saves and other collectives. If a process has
taken fewer steps than others and runs code that needs no other process, the
others wait for it. Processes with equal numbers of steps compile or compute,
and do not count as stuck, unless one of them runs the user's own code inside
of a step (`user_code.py`) and the others do not.
"""

import collections
import contextlib
import math
import time

from keras_tp.backend.processes import timeouts
from keras_tp.backend.processes import user_code

# Seconds added to KERAS_TP_TIMEOUT before a wait is a fault. Waits with a limit
# of their own end earlier, with an error that has more detail.
GRACE_S = 5.0
# Longest wait for a process that has ended, in seconds.
ENDED_S = 2.0
# After the communication failed, a process is the cause if it has been silent
# for this many seconds.
SILENT_S = 4.0
# Seconds between two reports of a process.
BEAT_S = 1.0

# The activity of a process: it runs code that needs no other process, takes a
# step with the others, or writes a file that the others wait for.
ALONE, TOGETHER, WRITING = "alone", "together", "writing"
# The status of a process: it runs, left at the end of its script, failed with
# an error, ended without a report, or its status is unknown.
HERE, LEFT, FAILED, GONE, UNKNOWN = "here", "left", "failed", "gone", "unknown"


class State(
    collections.namedtuple(
        "State",
        ["steps", "place", "kind", "still", "line", "silent", "status", "own"],
        defaults=["", 0.0, HERE, 0.0],
    )
):
    """The position of a process in the program.

    Args:
        steps: Int. Number of steps taken together with the others.
        place: String. Name of the current place in the program.
        kind: String. `ALONE`, `TOGETHER` or `WRITING`.
        still: Float. Seconds since the process reached this place.
        line: String. Line of the user's code that runs. Defaults to `""`.
        silent: Float. Seconds since the last report. Defaults to 0.
        status: String. `HERE`, `LEFT`, `GONE`, `UNKNOWN`, or the error of a
            process that failed. Defaults to `HERE`.
        own: Float. Seconds for which the process has run the user's own code
            in this place. Defaults to 0.
    """

    def is_here(self):
        """Returns whether the process has not ended."""
        return self.status == HERE

    def waited(self):
        """Returns for how many seconds the process has waited for others."""
        if self.kind == ALONE or self.status != HERE:
            return 0.0
        return self.still + self.silent


class _Position:
    """The position of this process in the program."""

    def reset(self):
        """Returns to the start of the script."""
        self.methods = ()
        self.steps = self.batches = 0
        # Name of the last step taken together with the others.
        self.step = "its start"
        self.move("the script", ALONE)

    __init__ = reset

    def move(self, place, kind):
        """Notes where this process is now."""
        self.place, self.kind, self.moved = place, kind, time.monotonic()


_own = _Position()
_code = user_code.Watch()
STARTING = State(0, "its start", ALONE, 0.0)


def alone(place):
    """Notes that this process runs code that needs no other process."""
    _own.move(place, ALONE)


def together(place):
    """Notes that this process takes a step that all processes take."""
    _own.steps += 1
    _own.step = place
    _own.move(place, TOGETHER)


def source():
    """Notes that this process requests a batch from its data source."""
    alone(f"its data source, after batch {_own.batches}{_of_method()}")


def end_of_data():
    """Notes that this process has no more batches in this epoch."""
    alone(f"the end of an epoch{_of_method()}")


def batch():
    """Notes that this process has a batch, which all processes compute."""
    _own.batches += 1
    together(f"batch {_own.batches}{_of_method()}")


@contextlib.contextmanager
def callback(name):
    """Context in which this process runs a method of callbacks."""
    with _returning():
        alone(f"`{name}` of a callback{_of_method()}")
        yield


@contextlib.contextmanager
def meeting(what):
    """Context in which this process waits for the others at a collective."""
    with _returning():
        together(f"{what.strip(',')}{_of_method()}")
        yield


@contextlib.contextmanager
def _returning():
    """Context that restores the position of this process at its end."""
    place, kind = _own.place, _own.kind
    try:
        yield
    finally:
        _own.move(place, kind)


@contextlib.contextmanager
def method(name):
    """Context in which this process runs a method of a model, as `"fit"`."""
    outer, batches = _own.methods, _own.batches
    place, kind = _own.place, _own.kind
    _own.methods, _own.batches = (*outer, name), 0
    alone(f"`{name}`")
    try:
        yield
    finally:
        _own.methods, _own.batches = outer, batches
        if not outer:
            place, kind = f"the script, after `{name}`", ALONE
        _own.move(place, kind)


def methods():
    """Returns the methods of models that run, the innermost one last.

    Each call of a method has a tuple of its own: `is` tells two calls apart.
    """
    return _own.methods


def own_state():
    """Returns the `State` of this process."""
    kind = _own.kind
    if kind == ALONE and timeouts.is_longer():
        kind = WRITING
    still = time.monotonic() - _own.moved
    line, seconds = _code.look()
    own = min(seconds, still)
    return State(_own.steps, _own.place, kind, still, line, own=own)


def failed_state():
    """Returns the `State` of this process after its last step failed."""
    kind, place, still = TOGETHER, _own.step, math.inf
    return own_state()._replace(kind=kind, place=place, still=still)


def fault(states, patience, has_failed=False):
    """Returns the fault of a run: its error message and a summary, or `None`.

    Args:
        states: Dict from the index of a process to its `State`.
        patience: Float. Seconds that processes wait for each other.
        has_failed: Boolean. Whether the communication has already failed, so
            that the fault is its cause. Defaults to `False`.
    """
    for index, state in sorted(states.items()):
        found = _fault_of(index, state, states, patience, has_failed)
        if found is not None:
            what, details = found
            rule = (
                " All processes have to run the same program to its end. They "
                f"wait for each other for {patience:g} seconds. If a process "
                "takes longer, increase KERAS_TP_TIMEOUT. Received: "
                f"KERAS_TP_TIMEOUT={patience:g}"
            )
            return f"{what}.{details}{rule}\n", f"{what}.\n"
    return None


def places(states, patience):
    """Returns where the other processes are, after a wait without a fault.

    Args:
        states: Dict from the index of a process to its `State`, without this
            process.
        patience: Float. Seconds that processes wait for each other.
    """
    where = []
    for index, state in sorted(states.items()):
        line = f", in {state.line}" if state.line else ""
        where.append(f"process {index} is at {state.place}{line}")
    return (
        f"No process is known to be stuck: {'; '.join(where)}. If one of them "
        "compiles, or computes, for longer than the others wait for it, "
        f"increase KERAS_TP_TIMEOUT. Received: KERAS_TP_TIMEOUT={patience:g}"
    )


def _fault_of(index, state, states, patience, has_failed):
    """Returns how a process holds up the others: a summary and details."""
    # After a failure, allow for reports that are up to `BEAT_S` old.
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
        how = "has ended without an error (by `os._exit` or a signal)"
    elif state.status not in (HERE, UNKNOWN):
        held_up = waiting_of(level, ENDED_S)
        how = f"failed ({state.status})"
    elif state.status == HERE and state.silent >= silence:
        held_up = waiting_of(level, silence)
        how = "does not answer (it may be stopped)"
    elif (
        state.status == HERE
        and state.kind == ALONE
        and state.still + state.silent >= least
    ):
        held_up = waiting_of(ahead, longest)
        how = f"is stuck in {state.place},"
    elif (
        state.status == HERE
        and state.kind == TOGETHER
        and state.own + state.silent >= least
    ):
        # A callback of a compiled program, or a layer that runs eagerly.
        held_up = [i for i in waiting_of(level, longest) if not others[i].own]
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
        details += f" Its code is at {state.line}."
    return what, details


def _of_method():
    return f" in `{_own.methods[-1]}`" if _own.methods else ""
