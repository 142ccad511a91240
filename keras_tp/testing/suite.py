"""Runs pytest on this package, in each process of a run alike."""

import hashlib
import os
import pathlib
import sys
import time

import pytest

# Set by torchrun and by the launcher, in each of several processes.
_INDEX = ("RANK", "KERAS_DISTRIBUTION_PROCESS_ID")


def index():
    """Returns the index of this process as a string; `None` if it is alone."""
    return next((os.environ[n] for n in _INDEX if n in os.environ), None)


@pytest.fixture
def tmp_path(request):
    """A folder for a test, which all processes share."""
    digest = hashlib.sha256(request.node.nodeid.encode()).hexdigest()
    folder = pathlib.Path(os.environ["KERAS_TP_TESTING_FOLDER"], digest[:24])
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def main():
    """Runs the tests; returns pytest's exit code."""
    arguments = ["-o", "addopts=", "-p", "no:cacheprovider", "-q", "-rs"]
    if index() is not None:
        # After a failure the processes may not be in step any more.
        arguments.append("--maxfail=1")
    if index() not in (None, "0"):
        # They run the same tests; process 0 tells.
        quiet = open(os.devnull, "w")
        os.dup2(quiet.fileno(), 1)
    arguments += ["--pyargs", "keras_tp.testing", *sys.argv[1:]]
    code = pytest.main(arguments, plugins=[sys.modules[__name__]])
    # The first process that ends with an error ends the others: let them say
    # what they found.
    time.sleep(2 if code else 0)
    return code


if __name__ == "__main__":
    sys.exit(main())
