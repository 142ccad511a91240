import pytest

from keras_tp.backend.processes import progress
from keras_tp.backend.processes.progress import ALONE
from keras_tp.backend.processes.progress import GONE
from keras_tp.backend.processes.progress import HERE
from keras_tp.backend.processes.progress import LEFT
from keras_tp.backend.processes.progress import TOGETHER
from keras_tp.backend.processes.progress import UNKNOWN
from keras_tp.backend.processes.progress import WRITING
from keras_tp.backend.processes.progress import State

T = 10.0
LONG = T + progress.GRACE_S + 1


def fault(*states, has_failed=False):
    found = progress.fault(dict(enumerate(states)), T, has_failed)
    return found and found[0]


def waits(steps=5, still=LONG, silent=0.0):
    return State(steps, "batch 5 in `fit`", TOGETHER, still, "", silent)


def alone(steps=4, still=LONG, silent=0.0, status=HERE, kind=ALONE):
    line = "script.py:7 (on_train_batch_end)"
    return State(steps, "a callback", kind, still, line, silent, status)


def inside(steps=5, own=LONG):
    """Returns a state inside of a step, in a layer or a host callback."""
    return waits(steps)._replace(line="script.py:9 (call)", own=own)


def test_a_process_that_is_behind_is_stuck():
    said = fault(waits(), alone())
    assert said.startswith("Process 1 is stuck in a callback, while others")
    assert "process 0 at batch 5 in `fit`" in said
    assert "script.py:7" in said
    assert said.endswith("Received: KERAS_TP_TIMEOUT=10\n")
    # Equal in all processes, whenever they look.
    assert "script.py" not in progress.fault({0: waits(), 1: alone()}, T)[1]


def test_a_process_in_user_code_inside_of_a_step_is_stuck():
    said = fault(waits(), inside())
    assert said.startswith("Process 1 is stuck in batch 5 in `fit`, while")
    assert "process 0 at batch 5 in `fit`" in said
    assert "script.py:9 (call)" in said


@pytest.mark.parametrize(
    "states",
    [
        # All compile, or compute.
        (waits(), waits()),
        # It compiles longer than others, which went on already.
        (waits(6), waits(5)),
        # Nobody waits: both run code of their own.
        (alone(5), alone(4)),
        # It moves.
        (waits(), alone(still=T - 1)),
        # Others have not waited for long.
        (waits(still=T), alone()),
        # It is ahead, and somebody else has to come.
        (waits(4), alone(5)),
        # Both run the user's code inside of a step, as they trace it.
        (inside(), inside()),
        # The user's code runs in a step, but not for long.
        (waits(), inside(own=T - 1)),
        (waits(still=T), inside()),
        # It is ahead in user code; the others may come.
        (waits(4), inside(5)),
        # It writes a file.
        (waits(), alone(kind=WRITING)),
        # Nothing is known about it.
        (waits(), alone(status=UNKNOWN, silent=LONG)),
        # It left after the last step that all take.
        (alone(5), alone(5, status=LEFT)),
        (waits(5), alone(5, status=LEFT)),
        # It has ended, and others need it no more.
        (alone(5), alone(5, status=GONE)),
        # Silent, but no process waits.
        (alone(5), alone(5, silent=LONG)),
    ],
)
def test_no_process_is_blamed(states):
    assert fault(*states) is None


@pytest.mark.parametrize(
    "state, said",
    [
        (alone(status=LEFT), "Process 1 left with exit code 0"),
        (alone(status=GONE), "Process 1 has ended without an error"),
        (alone(5, status=GONE), "Process 1 has ended without an error"),
        (alone(status="ValueError: no"), "Process 1 failed (ValueError: no)"),
        (waits(5, silent=T + 1), "Process 1 does not answer"),
    ],
)
def test_a_process_that_does_not_come_back(state, said):
    assert fault(waits(5), state).startswith(said)


def test_the_cause_of_a_failed_step_is_found_sooner():
    failed, other = waits(still=float("inf")), alone(still=T - 0.5)
    assert fault(failed, other) is None
    assert "stuck" in fault(failed, other, has_failed=True)
    silent = waits(still=0.0, silent=progress.SILENT_S + 0.1)
    assert fault(failed, silent) is None
    assert "does not answer" in fault(failed, silent, has_failed=True)


def test_where_processes_are_if_none_is_stuck():
    said = progress.places({1: waits(), 2: alone()}, T)
    assert (
        "process 1 is at batch 5 in `fit`; process 2 is at a callback" in said
    )
    assert "script.py:7 (on_train_batch_end)" in said
    assert said.endswith("Received: KERAS_TP_TIMEOUT=10")


def test_steps_and_places():
    before = progress.own_state()
    with progress.method("fit"):
        progress.source()
        assert progress.own_state().kind == ALONE
        assert progress.own_state().steps == before.steps
        progress.batch()
        state = progress.own_state()
        assert (state.steps, state.kind) == (before.steps + 1, TOGETHER)
        assert state.place == "batch 1 in `fit`"
        with progress.callback("on_train_batch_end"):
            assert progress.own_state().kind == ALONE
            with progress.meeting("A collective,"):
                state = progress.own_state()
                assert state.place == "A collective in `fit`"
                assert (state.steps, state.kind) == (before.steps + 2, TOGETHER)
            assert progress.own_state().kind == ALONE
        assert progress.own_state().place == "batch 1 in `fit`"
    assert progress.own_state().place == "the script, after `fit`"
    failed = progress.failed_state()
    assert (failed.kind, failed.place) == (TOGETHER, "A collective in `fit`")
