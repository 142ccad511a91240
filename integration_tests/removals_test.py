"""What `removals.py` concludes from how a test ended in each process."""

import keras
import pytest

from integration_tests import removals

pytestmark = pytest.mark.skipif(
    keras.config.backend() != "jax", reason="the same on each backend"
)


@pytest.mark.parametrize(
    "outcomes, failure, in_step",
    [
        (["", ""], "", True),
        (["assert 1 == 2"], "assert 1 == 2", True),
        (["assert 1 == 2", "assert 1 == 2"], "assert 1 == 2", True),
        # One process may have waited for the other.
        (["", "assert 1 == 2"], "assert 1 == 2", False),
        (["timed out", "assert 1 == 2"], "timed out", False),
        (["pair closure", "assert 1 == 2"], "assert 1 == 2", False),
        (["Connection closed"] * 2, "Connection closed", False),
    ],
)
def test_processes_that_are_out_of_step(outcomes, failure, in_step):
    assert removals.says_most(outcomes) == failure
    assert removals.are_in_step(outcomes) == in_step
