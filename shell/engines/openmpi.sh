#!/usr/bin/env bash
# Runs examples/engines/train.py by Open MPI's mpirun, and prints a table of what
# was tried. Arguments are backends, by default all. Run shell/test.sh before, or
# set PYTHON to a Python that has keras_tp and the backends:
#
#   bash shell/engines/openmpi.sh
#   bash shell/engines/openmpi.sh torch
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
if ! command -v mpirun >/dev/null; then
    echo "skipped: mpirun (Debian: openmpi-bin) is not installed"
    exit 0
fi
exec "${PYTHON:-.venv-test/bin/python}" -m integration_tests.engines openmpi "$@"
