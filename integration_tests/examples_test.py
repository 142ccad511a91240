"""The examples run to their end, on two devices."""

import os
import pathlib
import re

import pytest

from integration_tests import launching

ROOT = pathlib.Path(__file__).parent.parent

pytestmark = pytest.mark.skipif(
    "RANK" in os.environ,
    reason="starts its own processes",
)


def _numbers(output, name):
    """Returns the numbers in the line that begins with a word."""
    (line,) = re.findall(rf"^.*\b{name} (.*)$", output, re.MULTILINE)
    return [float(n) for n in re.findall(r"[\d.]+(?:e-?\d+)?", line)]


def _check_custom_layer(output):
    assert "passed=True" in output


def _check_existing_model(output):
    assert _numbers(output, "outputs differ by")[0] < 1e-5
    # Half of what one device would hold, and a little that is whole.
    words = r"devices holds ([\d.]+) KiB. .* have ([\d.]+) KiB"
    held, total = map(float, re.search(words, output).groups())
    assert total / 2 < held < 0.51 * total
    losses = _numbers(output, "losses")
    assert losses == sorted(losses, reverse=True)
    assert _numbers(output, "on one device")[0] < losses[-1]


def _check_llama(output):
    losses = _numbers(output, "losses")
    assert losses[-1] < 0.01 * losses[0]
    # It has learned to count.
    tokens = _numbers(output, "sample")
    assert tokens == [(tokens[0] + k) % 64 for k in range(16)]


CHECKS = {
    "custom_layer": _check_custom_layer,
    "existing_model": _check_existing_model,
    "llama": _check_llama,
}


@pytest.mark.parametrize("name", CHECKS)
def test_example(name, tmp_path):
    script = str(ROOT / "examples" / f"{name}.py")
    launched = ("-m", "keras_tp.launch", "--devices", "2", script)
    CHECKS[name](launching.output_of(*launched, folder=tmp_path))
