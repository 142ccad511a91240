#!/usr/bin/env bash
# Runs the linter and the tests of one backend (KERAS_BACKEND; JAX by default)
# in an environment of its own. Arguments go to pytest, in place of the tests
# that are run otherwise:
#
#   bash shell/test.sh
#   bash shell/test.sh keras_tp/distribution -k layout
#   KERAS_BACKEND=torch bash shell/test.sh
#   KERAS_BACKEND=torch KERAS_TP_TORCH_DEVICES=4 bash shell/test.sh
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
export KERAS_BACKEND=${KERAS_BACKEND:-jax}
export TF_CPP_MIN_LOG_LEVEL=${TF_CPP_MIN_LOG_LEVEL:-3}
export XLA_FLAGS=${XLA_FLAGS:---xla_force_host_platform_device_count=8}
case $KERAS_BACKEND in
torch)
    make_environment .venv-torch torch,hub,test
    # The tests that need several devices run in the processes that the last
    # of these launches: KERAS_TP_TORCH_DEVICES of them, 2 by default.
    tests=(
        keras_tp/backend keras_tp/launch_test.py
        integration_tests/torch_processes_test.py
    )
    # One process per device: threads of several would fight for the cores.
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
    ;;
tensorflow)
    make_environment .venv-test jax,hub,test
    tests=(keras_tp/backend integration_tests/parity_test.py)
    ;;
*)
    make_environment .venv-test jax,hub,test
    tests=(keras_tp integration_tests)
    ;;
esac
"$PYTHON" -m ruff check .
"$PYTHON" -m ruff format --check .
[ $# -gt 0 ] || set -- "${tests[@]}"
exec "$PYTHON" -m pytest "$@"
