"""A few of what `shell/fuzz.sh` searches; more with KERAS_TP_SLOW=1."""

import os
import subprocess
import sys

import keras
import pytest

from integration_tests import fuzz_files
from integration_tests import fuzz_kills
from integration_tests import launching

SLOW = os.environ.get("KERAS_TP_SLOW") == "1"
COUNTS = {"weights": 60, "model": 10}


@pytest.mark.parametrize("kind", fuzz_files.FORMATS)
def test_no_damage_changes_a_value(kind):
    count = 1000 if SLOW else COUNTS.get(kind, 30)
    outcomes, defects = fuzz_files.search(kind, seed=3, count=count)
    assert not defects
    assert sum(outcomes.values()) == count
    assert outcomes["refused"] > count / 4


@pytest.mark.parametrize("kind", ["weights", "parts", "model", "folder"])
def test_no_damage_changes_a_value_that_is_read_in_parts(kind, copied):
    count = 1000 if SLOW else 15
    outcomes, defects = fuzz_files.search(kind, seed=4, count=count)
    assert not defects
    assert sum(outcomes.values()) == count


@pytest.mark.parametrize("kind", fuzz_kills.NAMES)
def test_no_kill_loses_a_save(kind):
    backend = keras.config.backend()
    if not fuzz_kills.FORKS:
        pytest.skip("a fork of TensorFlow does not save")
    if backend == "jax" and not SLOW:
        pytest.skip("a fork of JAX may wait for threads; KERAS_TP_SLOW=1 runs")
    count = 200 if SLOW else 5
    outcomes, defects = fuzz_kills.search(kind, seed=3, count=count)
    assert not defects
    assert sum(outcomes.values()) == count


@pytest.mark.parametrize("processes", [1, 2])
def test_no_kill_of_a_run_loses_a_save(processes):
    if processes == 1 and fuzz_kills.FORKS:
        pytest.skip("forks of this process show it")
    # In a process of its own, where no runtime has started, and with a device
    # for each process.
    count = 200 if SLOW else 2
    result = subprocess.run(
        [
            *(sys.executable, fuzz_kills.__file__, "--what", "weights"),
            *("--processes", str(processes), "--count", str(count)),
        ],
        env=launching.environment(),
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert f'"whole": {count}' in result.stdout
