"""What a run of several processes shows: the first process, the first error."""

import os
import subprocess
import sys

import keras
import pytest

from integration_tests import launching

BACKEND = keras.config.backend()

pytestmark = pytest.mark.skipif(
    "RANK" in os.environ, reason="launches processes of its own"
)

SCRIPT = """
import os
import signal
import sys
import threading
import warnings

import keras
import numpy as np

from keras_tp import distribution as dist
from keras_tp.backend import distribution_lib as lib

what = sys.argv[1]
index = lib.process_id()
if what == "speak":
    # For what `tf.data` is imported, on each backend.
    keras.src.utils.module_utils.tensorflow.__version__
    dist.set_distribution(dist.TensorParallel())
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4)])
    model.compile("sgd", "mse")
    model.fit(np.ones((8, 8)), np.ones((8, 4)), verbose=0)
    model.summary()
    print(dist.describe(model))
    warnings.warn("warned")
    layout_map = dist.LayoutMap(dist.DeviceMesh((2,), ["model"]))
    layout_map["nothing/kernel"] = (None, "model")
    with dist.ModelParallel(layout_map=layout_map).scope():
        other = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4)])
        other.compile("sgd", "mse")
if what == "all raise":
    raise ValueError("the same error")
if index == 1:
    print("the last words", file=sys.stderr)
    if what == "raise":
        raise ValueError("the first error")
    if what == "exit":
        sys.exit(7)
    if what == "abort":
        os.abort()
if what != "speak":
    # The launcher ends it.
    threading.Event().wait(600)
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    path = tmp_path_factory.mktemp("output") / "script.py"
    path.write_text(SCRIPT)
    return str(path)


def run(*arguments, processes=2):
    # Users see the output without this variable.
    env = launching.environment()
    env.pop("TF_CPP_MIN_LOG_LEVEL", None)
    options = ["--devices", "2"]
    if BACKEND != "torch":
        options += ["--processes", str(processes)]
    return subprocess.run(
        [sys.executable, "-m", "keras_tp.launch", *options, *arguments],
        env=env,
        capture_output=True,
        text=True,
        timeout=300,
    )


SPOKEN = {
    "stdout": ("Total params", "Sharding of sequential"),
    "stderr": ("UserWarning: warned", "'nothing/kernel'"),
}
# Of TensorFlow, absl and torchrun.
NOISE = (
    "oneDNN",
    "cudart",
    "cuInit",
    "InitializeLog",
    "AVX",
    "OMP_NUM_THREADS",
    "I0000",
)


def check_spoken(result, times):
    assert result.returncode == 0, result.stderr[-4000:]
    for stream, texts in SPOKEN.items():
        output = getattr(result, stream)
        for text in texts:
            assert output.count(text) == times, output
    for text in NOISE:
        assert text not in result.stdout + result.stderr, result.stderr


def test_the_first_process_speaks(script):
    check_spoken(run(script, "speak"), 1)


def test_all_processes_speak_if_asked_to(script):
    check_spoken(run("--all-output", script, "speak"), 2)


@pytest.mark.skipif(BACKEND == "torch", reason="has one process per device")
def test_one_process_starts_without_noise(script):
    check_spoken(run(script, "speak", processes=1), 1)


def check_error(result, code, *texts):
    assert result.returncode == code
    last = launching.last_report(result.stderr)
    assert last.startswith("First error, process"), result.stderr
    assert result.stderr.endswith(last)
    for text in texts:
        assert text in last, result.stderr
    # One report, of keras_tp.
    assert "elastic" not in result.stderr
    assert result.stderr.count("First error") == 1
    assert result.stderr.count("Traceback") == last.count("Traceback")


def test_the_first_error_is_last(script):
    result = run(script, "raise")
    check_error(result, 1, "First error, process 1 of 2:\nTraceback")
    # The user's own lines only.
    assert result.stderr.endswith("ValueError: the first error\n")
    assert result.stderr.count("  File ") == 1, result.stderr


def test_an_error_of_all_is_told_once(script):
    result = run(script, "all raise")
    check_error(result, 1, "process", "ValueError: the same error\n")
    told = result.stderr.count("ValueError: the same error\n")
    # A process that was ended before it reported is not named.
    assert told == 1, result.stderr


@pytest.mark.parametrize(
    "what, code, how",
    [
        ("exit", 7, "It ended with exit code 7.\n"),
        ("abort", 134, "It was ended by SIGABRT.\n"),
    ],
)
def test_a_process_that_was_not_shown_has_the_last_word(
    what, code, how, script
):
    result = run(script, what)
    check_error(result, code, f"First error, process 1 of 2:\n{how}")
    assert "the last words\n" in launching.last_report(result.stderr)


def test_all_errors_are_shown_if_asked_to(script):
    result = run("--all-output", script, "raise")
    assert result.returncode == 1
    assert result.stderr.endswith("ValueError: the first error\n")
    # As it was printed.
    assert "the last words\n" in result.stderr
