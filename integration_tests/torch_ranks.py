"""Runs pytest in every process of a torch run: the same tests, in step.

    python -m keras_tp.launch --devices 2 integration_tests/torch_ranks.py

JAX and TensorFlow can, too, with `--processes 2` and the names of tests.

Without arguments all of `SHARED` are run; arguments go to pytest. Process 0
prints; the others write `rank_<index>.txt` into the folder that
KERAS_TP_RANK_FOLDER names, and every process writes its failures into
`failed_<index>.txt` there. `tmp_path` is one folder for all processes, because
one of them writes the files that all of them read.
"""

import hashlib
import os
import pathlib
import sys
import tempfile
import time

import pytest

ROOT = pathlib.Path(__file__).parent.parent

# What runs in every process: the tests of all backends that need devices, and
# torch's own. The others are about one process, or launch their own.
SHARED = [
    "keras_tp/distribution",
    "keras_tp/tensor_parallel_keras_test.py",
    "keras_tp/backend/torch/compiling_test.py",
    "keras_tp/backend/torch/fully_sharded_test.py",
    "keras_tp/backend/torch/gradient_sums_test.py",
    "keras_tp/backend/torch/overlap_test.py",
    "keras_tp/backend/torch/sequence_parallel_test.py",
    *(
        f"integration_tests/{name}_test.py"
        for name in (
            "bad_input",
            "blocks",
            "callbacks",
            "checkpoints",
            "named_checkpoints",
            "checkpoint_derived",
            "checkpoint_faults",
            "checkpoint_hub",
            "collectives",
            "communication",
            "contamination",
            "faults",
            "generate",
            "hub_backbones",
            "orbax",
            "derived_variables",
            "expected_values",
            "forms",
            "gathers",
            "parity",
            "ops",
            "ops_layers",
            "planned_models",
            "presets",
            "recipes",
            "recurrent",
            "public_api",
            "rematerialization",
            "residence",
            "resumed_runs",
            "whole_model",
            "gradients",
            "row_parallel",
            "conventions",
            "llama",
            "monitor",
            "saving",
            "sequence_parallel",
            "sparse",
            "split_vocabulary",
            "stored_weights",
            "streamed_values",
            "torch_data",
            "torch_models",
            "torch_ops",
            "torch_reading",
            "torch_shards",
            "torch_losses",
            "torch_writing",
            "training",
            "uneven",
            "variable_operators",
            "zero",
        )
    ),
]


def _index():
    environment = os.environ
    return (
        environment.get("RANK") or environment["KERAS_DISTRIBUTION_PROCESS_ID"]
    )


def _folder():
    name = os.environ.get("KERAS_TP_RANK_FOLDER")
    if name is None:
        # torchrun gives all of its processes the same id.
        run = os.environ.get("TORCHELASTIC_RUN_ID", "one")
        name = pathlib.Path(tempfile.gettempdir(), f"keras_tp_ranks_{run}")
    return pathlib.Path(name)


@pytest.fixture
def tmp_path(request):
    digest = hashlib.sha256(request.node.nodeid.encode()).hexdigest()
    folder = _folder() / digest[:16]
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def pytest_runtest_logreport(report):
    if report.failed:
        path = _folder() / f"failed_{_index()}.txt"
        with open(path, "a") as file:
            file.write(f"{report.nodeid}\n{report.longreprtext}\n")


def main():
    index = _index()
    folder = _folder()
    folder.mkdir(parents=True, exist_ok=True)
    if index != "0":
        output = open(folder / f"rank_{index}.txt", "w", buffering=1)
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    # Next to the tests that it is given, not to the module it is now.
    sys.path.insert(0, str(ROOT))
    os.chdir(ROOT)
    # After a failure the processes may not be in step any more.
    arguments = sys.argv[1:] or ["-x", "--tb=short", *SHARED]
    code = pytest.main(["-p", "integration_tests.torch_ranks", *arguments])
    # torchrun ends all processes with the first that fails: let the others
    # print what they found.
    time.sleep(2 if code else 0)
    return code


if __name__ == "__main__":
    sys.exit(main())
