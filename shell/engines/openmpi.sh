#!/usr/bin/env bash
# Runs examples/engines/train.py by Open MPI's mpirun, and prints a table of what
# was tried. Arguments are backends, by default all:
#
#   bash shell/engines/openmpi.sh
#   bash shell/engines/openmpi.sh torch
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
# mpirun starts daemons of other hosts with ssh.
need mpirun "openmpi-bin openssh-client"
need_python
exec "$PYTHON" -m integration_tests.engines openmpi "$@"
