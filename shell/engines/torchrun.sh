#!/usr/bin/env bash
# Runs examples/engines/train.py by torchrun, with and without a restart, and
# prints a table of what was tried.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
need_python
exec "$PYTHON" -m integration_tests.engines torchrun torch
