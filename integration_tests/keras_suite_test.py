"""Keras's own tests under a distribution: the runner, and a part of them."""

import os
import textwrap

import keras
import pytest

from integration_tests import keras_suite
from integration_tests import keras_suite_listed
from integration_tests import keras_suite_worker
from keras_tp import backend

BACKEND = keras.config.backend()

# What is told of a test, and how it ends.
OWN_TESTS = {
    "active_test.py": """
        import os
        import pathlib
        import time

        import keras
        from keras.src import testing

        from keras_tp import backend

        def setup_function():
            assert keras.distribution.distribution() is None

        def axes():
            layer = keras.layers.Dense(6)
            layer.build((None, 4))
            return backend.distribution_lib.variable_axes(layer.kernel)

        def test_function():
            assert axes() == (None, "model")

        def test_it_stays():
            keras.utils.clear_session()
            assert axes() == (None, "model")

        class ActiveTest(testing.TestCase):
            def test_method(self):
                assert axes() == (None, "model")

            def test_left(self):
                keras.distribution.set_distribution(None)

            def test_assertion(self):
                self.assertEqual(axes(), ())

            def test_skipped(self):
                self.skipTest("not here")

            def test_same_folder(self):
                folder = pathlib.Path(self.get_temp_dir())
                assert folder != pathlib.Path(self.get_temp_dir())
                (folder / os.environ.get("RANK", "0")).write_text("")
                count = int(os.environ.get("WORLD_SIZE", "1"))
                until = time.monotonic() + 5
                while len(list(folder.iterdir())) < count:
                    assert time.monotonic() < until
        """,
    "ends_test.py": """
        import os
        import time

        LAST = os.environ.get("RANK", "0") == os.environ.get(
            "LAST_RANK", "0"
        )

        def test_crash():
            if LAST:
                os._exit(3)

        def test_hang():
            if LAST:
                time.sleep(600)

        def test_after():
            pass
        """,
}


@pytest.fixture(scope="module")
def own_results(tmp_path_factory):
    """What the runner finds in tests of which it is known how they end."""
    folder = tmp_path_factory.mktemp("own")
    for name, text in OWN_TESTS.items():
        (folder / name).write_text(textwrap.dedent(text))
    run = keras_suite.Run(BACKEND, "tensor", 2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LAST_RANK", "1" if BACKEND == "torch" else "0")
        with open(folder / "output", "w") as output:
            batches = keras_suite.run_files(
                run,
                list(OWN_TESTS),
                folder,
                limit=8,
                output=output,
                source=folder,
            )
            assert [names for names, _ in batches] == [list(OWN_TESTS)]
    rows = keras_suite.results_of(run, folder)
    # What is there is not run again.
    assert not list(keras_suite.run_files(run, list(OWN_TESTS), folder))
    return rows


def test_how_tests_end(own_results):
    assert {
        test.rpartition("::")[2]: row["outcome"]
        for test, row in own_results.items()
    } == {
        "test_function": "passed",
        "test_it_stays": "passed",
        "test_method": "passed",
        "test_left": "passed",
        "test_assertion": "failed",
        "test_skipped": "skipped",
        "test_same_folder": "passed",
        "test_crash": "crashed",
        "test_hang": "crashed",
        "test_after": "passed",
    }, {test: row["error"] for test, row in own_results.items()}


def test_distribution_is_active_to_the_end(own_results):
    left = {
        test.rpartition("::")[2]
        for test, row in own_results.items()
        if row["outcome"] == "passed" and not row["kept"]
    }
    assert left == {"test_left"}


def test_a_test_that_asks_nothing_is_run_under_one_distribution(
    own_results, tmp_path
):
    asked = {
        test.rpartition("::")[2]: row.get("asked", True)
        for test, row in own_results.items()
    }
    assert asked["test_function"] and asked["test_method"]
    assert not asked["test_after"] and not asked["test_skipped"]
    ended = [{"test": f"{name}.py::test", **row} for name, row in ROWS.items()]
    ended += [{"done": f"{name}.py"} for name in ROWS]
    tensor = keras_suite.Run(BACKEND, "tensor", 2)
    data = tensor._replace(distribution="data")
    keras_suite._append(tensor, tmp_path, ended)
    files = [f"{name}.py" for name in ROWS]
    keras_suite.take_over(data, files, tmp_path)
    keras_suite.take_over(data, files, tmp_path)
    assert keras_suite.done_files(data, tmp_path) == {"free.py", "skips.py"}
    assert set(keras_suite.results_of(data, tmp_path)) == {
        "free.py::test",
        "skips.py::test",
    }


ROWS = {
    "free": {"outcome": "passed", "asked": False},
    "skips": {"outcome": "skipped", "asked": False},
    "asks": {"outcome": "passed", "asked": True},
    "fails": {"outcome": "failed", "asked": False},
    "older": {"outcome": "passed"},
}


@pytest.mark.skipif(BACKEND == "torch", reason="one process has one device")
@pytest.mark.parametrize(
    ["name", "expected"],
    [
        ("data", (None, None)),
        ("map", (None, "model")),
        ("tensor", (None, "model")),
    ],
)
def test_what_a_distribution_splits(name, expected):
    with keras_suite_worker.make_distribution(name, 2).scope():
        layer = keras.layers.Dense(6)
        layer.build((None, 4))
    axes = backend.distribution_lib.variable_axes(layer.kernel)
    assert axes == expected


def test_what_is_compared(tmp_path):
    rows = {
        "saving/saving_api_test.py::A::test_load_sharded_weights": "listed",
        "saving/saving_api_test.py::A::test_other": "failed",
        "saving/saving_api_test.py::A::test_missing_package": "skipped",
    }
    of = keras_suite.Run(BACKEND, "tensor", 2)
    failed = [{"test": test, "outcome": "failed"} for test in rows]
    keras_suite._append(of, tmp_path, failed)
    # The listed one was not run without a distribution.
    plain = of._replace(distribution="none")
    keras_suite._append(plain, tmp_path, failed[2:])
    (found,) = keras_suite.compare(BACKEND, "tensor", 2, tmp_path).values()
    assert found == rows


@pytest.mark.parametrize(
    ["outcomes", "expected"],
    [
        (["passed", "passed"], "passed"),
        (["skipped", "skipped"], "skipped"),
        (["passed", "failed"], "failed"),
        (["passed", "skipped"], "failed"),
        (["passed", None], "crashed"),
    ],
)
def test_a_test_ends_alike_in_all_processes(outcomes, expected):
    rows = [
        [{"test": "a", "outcome": outcome, "error": ""}] if outcome else []
        for outcome in outcomes
    ]
    (row,) = keras_suite.joined_rows(rows)
    assert row["outcome"] == expected


def test_what_is_listed_exists():
    files = keras_suite.select_files([])
    assert len(files) == 277
    for row in keras_suite_listed.LISTED:
        name = row.pattern.split("::")[0]
        assert set(row.backends) <= set(keras_suite.BACKENDS)
        assert set(row.distributions) <= set(keras_suite.DISTRIBUTIONS[1:])
        assert keras_suite.select_files([name]), f"{name} is not of Keras"
        assert row.reason


# What CI runs of Keras's tests: much in little time.
EVERYWHERE = {
    "tensor": [
        "layers/rnn/simple_rnn_test.py",
        "models/sequential_test.py",
        "optimizers/adam_test.py",
        "optimizers/loss_scale_optimizer_test.py",
        "losses/loss_test.py",
        "metrics/metric_test.py",
    ],
    "data": [
        "models/sequential_test.py",
        "callbacks/early_stopping_test.py",
    ],
}
# Some backends also run files that take too long on others. Under "map", each
# weight is split along its largest dim.
SLICES = {
    "jax": {
        "tensor": [
            *EVERYWHERE["tensor"],
            "callbacks/backup_and_restore_test.py",
            "saving/saving_api_test.py",
        ],
        "map": [
            "layers/normalization/layer_normalization_test.py",
            "models/sequential_test.py",
            "optimizers/sgd_test.py",
        ],
        "data": EVERYWHERE["data"],
    },
    "tensorflow": {
        **EVERYWHERE,
        "map": [
            "layers/normalization/layer_normalization_test.py",
            "models/sequential_test.py",
            "optimizers/sgd_test.py",
        ],
    },
    "torch": {
        "tensor": [
            *EVERYWHERE["tensor"],
            "callbacks/backup_and_restore_test.py",
            "callbacks/tensorboard_test.py",
            "layers/attention/multi_head_attention_test.py",
            "layers/convolutional/conv_test.py",
            "models/model_test.py",
        ],
        "map": [
            "layers/core/dense_test.py",
            "layers/normalization/layer_normalization_test.py",
            "models/functional_test.py",
            "models/sequential_test.py",
            "optimizers/sgd_test.py",
        ],
        "data": EVERYWHERE["data"],
    },
}
SLICE = SLICES[BACKEND]
SLOW = os.environ.get("KERAS_TP_SLOW") == "1"


@pytest.mark.parametrize("name", SLICE)
def test_tests_of_keras(name, tmp_path):
    files = keras_suite.select_files([] if SLOW else SLICE[name])
    with open(tmp_path / "output", "w") as output:

        def run(distribution, files, only=None):
            of = keras_suite.Run(BACKEND, distribution, 2)
            for _ in keras_suite.run_files(
                of,
                files,
                tmp_path,
                batch=len(files),
                output=output,
                only=only,
            ):
                pass
            return keras_suite.results_of(of, tmp_path)

        rows = run(name, files)
        assert any(row["outcome"] == "passed" for row in rows.values())
        suspect = [
            test
            for test in keras_suite.unexplained(
                keras_suite.Run(BACKEND, name, 2), tmp_path
            )
            if not keras_suite_listed.reason_for(test, BACKEND, name)
        ]
        # Some are skipped, or fail, on one device too: a package is missing.
        run("none", sorted({t.split("::")[0] for t in suspect}), suspect)
    failed = {
        test: error
        for _, test, error in keras_suite.failures_of(BACKEND, 2, tmp_path)
    }
    assert not failed, "\n\n".join(f"{t}\n{e}" for t, e in failed.items())
