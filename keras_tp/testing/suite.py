"""Runs pytest on this package, in each process of a run alike."""

import hashlib
import os
import pathlib
import sys
import tempfile
import time

import pytest

# Set by torchrun and by the launcher, in each of several processes.
_INDEX = ("RANK", "KERAS_DISTRIBUTION_PROCESS_ID")


def index():
    """Returns the index of this process."""
    return next((os.environ[n] for n in _INDEX if n in os.environ), "0")


@pytest.fixture
def tmp_path(request):
    """A folder for a test, which all processes share."""
    run = os.environ.get("TORCHELASTIC_RUN_ID", str(os.getpid()))
    digest = hashlib.sha256(f"{run} {request.node.nodeid}".encode())
    folder = pathlib.Path(tempfile.gettempdir(), "keras_tp_testing")
    folder = folder / digest.hexdigest()[:24]
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def main():
    """Runs the tests; returns pytest's exit code."""
    if index() != "0":
        # They run the same tests; process 0 tells.
        quiet = open(os.devnull, "w")
        os.dup2(quiet.fileno(), 1)
    arguments = ["-o", "addopts=", "-p", "no:cacheprovider", "-q", "-rs"]
    arguments += ["--pyargs", "keras_tp.testing", *sys.argv[1:]]
    code = pytest.main(arguments, plugins=[sys.modules[__name__]])
    # The first process that ends with an error ends the others: let them say
    # what they found.
    time.sleep(2 if code else 0)
    return code


if __name__ == "__main__":
    sys.exit(main())
