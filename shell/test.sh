#!/usr/bin/env bash
# Runs the linter and all tests in an environment of its own. Arguments go to
# pytest, in place of the folders with tests:
#
#   bash shell/test.sh
#   bash shell/test.sh keras_tp/distribution -k layout
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
make_environment .venv-test jax,hub,test
export KERAS_BACKEND=${KERAS_BACKEND:-jax}
export TF_CPP_MIN_LOG_LEVEL=${TF_CPP_MIN_LOG_LEVEL:-3}
export XLA_FLAGS=${XLA_FLAGS:---xla_force_host_platform_device_count=8}
"$PYTHON" -m ruff check .
"$PYTHON" -m ruff format --check .
[ $# -gt 0 ] || set -- keras_tp integration_tests
exec "$PYTHON" -m pytest "$@"
