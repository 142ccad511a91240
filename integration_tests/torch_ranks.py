"""Runs pytest in every process of a torch run: the same tests, in step.

    python -m keras_tp.launch --devices 2 integration_tests/torch_ranks.py \
        integration_tests/parity_test.py -k 1x2

Process 0 prints; the others write `rank_<index>.txt` into the folder that
KERAS_TP_RANK_FOLDER names. `tmp_path` is one folder for all processes, because
one of them writes the files that all of them read.
"""

import hashlib
import os
import pathlib
import sys
import tempfile
import time

import pytest

# What a mesh that leaves out a process is answered with.
_OTHER_WORLD = (
    "torch runs one process per device",
    "Shape does not match the number of devices",
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


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_call(item):
    """A mesh of another size than this run is a skip."""
    outcome = yield
    if outcome.excinfo is None:
        return
    kind, error, _ = outcome.excinfo
    if issubclass(kind, ValueError) and str(error).startswith(_OTHER_WORLD):
        if "Received: shape" in str(error) and "listed" in str(error):
            return
        outcome.force_exception(pytest.skip.Exception(str(error)))


def main():
    index = os.environ["RANK"]
    folder = _folder()
    folder.mkdir(parents=True, exist_ok=True)
    if index != "0":
        output = open(folder / f"rank_{index}.txt", "w", buffering=1)
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    # Next to the tests that it is given, not to the module it is now.
    root = str(pathlib.Path(__file__).parent.parent)
    sys.path.insert(0, root)
    code = pytest.main(["-p", "integration_tests.torch_ranks", *sys.argv[1:]])
    # torchrun ends all processes with the first that fails: let the others
    # print what they found.
    time.sleep(2 if code else 0)
    return code


if __name__ == "__main__":
    sys.exit(main())
