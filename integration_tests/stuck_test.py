"""A part of `stuck.py`: how runs end in which one process fails."""

import os

import keras
import pytest

from integration_tests import stuck

BACKEND = keras.config.backend()
# The other backends' launcher is killed in `processes_test.py`.
SOME = (
    "loop_callback",
    "launcherkill_callback" if BACKEND == "torch" else "osexit0_callback",
)
# With other processes on the same cores, starting and ending take longer. CI
# asks for what is said, and that the run ends; `stuck.py` measures how soon.
SLACK_S = 20 if os.environ.get("KERAS_TP_SLOW") == "1" else 120


@pytest.mark.parametrize(
    "case, run",
    [
        pytest.param(
            case,
            run,
            marks=[] if case in SOME and run == 0 else pytest.mark.slow,
        )
        for case in stuck.cases(BACKEND)
        for run in range(5)
    ],
)
def test_how_a_run_ends(case, run, tmp_path):
    outcome = stuck.run(case, BACKEND, tmp_path, SLACK_S)
    assert not outcome.problem(SLACK_S), (outcome, outcome.errors[-4000:])
