"""A few of the searches of `fuzz_files.py`; all with KERAS_TP_SLOW=1."""

import os

import pytest

from integration_tests import fuzz_files

SLOW = os.environ.get("KERAS_TP_SLOW") == "1"
COUNTS = {"weights": 60, "model": 10}


@pytest.mark.parametrize("kind", fuzz_files.FORMATS)
def test_no_damage_changes_a_value(kind):
    count = 1000 if SLOW else COUNTS.get(kind, 30)
    outcomes, defects = fuzz_files.search(kind, seed=3, count=count)
    assert not defects
    assert sum(outcomes.values()) == count
    assert outcomes["refused"] > count / 4
