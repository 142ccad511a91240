"""What every process has to call, called by one: an error that says so."""

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
import sys

import keras
import numpy as np

from keras_tp import distribution as dist
from keras_tp.backend import distribution_lib as lib


def build():
    inputs = keras.Input((8,))
    x = keras.layers.Dense(16, name="up")(inputs)
    model = keras.Model(inputs, keras.layers.Dense(8, name="down")(x))
    model.compile("sgd", "mse")
    return model


if __name__ == "__main__":
    keras.utils.set_random_seed(1)
    x = np.ones((8, 8), "float32")
    plain = build()
    parallel = dist.TensorParallel()
    with parallel.scope():
        model = build()
        model.fit(x, x, verbose=0)
    what = sys.argv[1]
    if lib.process_id() == 0:
        if what == "none":
            # None of these needs another process.
            dist.describe(plain)
            dist.plan_sharding(build, parallel.device_mesh).summary()
            print("planned by one process")
        if what == "describe":
            dist.describe(model)
        if what == "count_collectives":
            dist.count_collectives(model, x, x)
        if what == "verify":
            dist.verify(build, parallel, x, x)
    model.fit(x, x, verbose=0)
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    path = tmp_path_factory.mktemp("calls") / "script.py"
    path.write_text(SCRIPT)
    return str(path)


def run(*arguments):
    options = ["--devices", "2"]
    if BACKEND != "torch":
        options += ["--processes", "2"]
    return subprocess.run(
        [sys.executable, "-m", "keras_tp.launch", *options, *arguments],
        env=launching.environment(KERAS_TP_TIMEOUT="10"),
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.mark.parametrize("what", ["describe", "count_collectives", "verify"])
def test_one_process_calls_what_all_have_to(what, script):
    result = run(script, what)
    assert result.returncode == 1
    last = launching.last_report(result.stderr)
    assert last.startswith("First error"), result.stderr[-4000:]
    assert "out of any `if rank == 0:`" in last
    if last.startswith("First error, process 0"):
        # It called it, and says who is missing.
        assert f"`{what}` is a collective of 2 processes" in last
        assert "Missing: process(es) [1]" in last
    else:
        # It went on without, and began to wait a moment earlier.
        assert f"process 0 at `{what}`" in last


def test_one_process_may_plan(script):
    result = run(script, "none")
    assert result.returncode == 0, result.stderr[-4000:]
    assert "planned by one process" in result.stdout
