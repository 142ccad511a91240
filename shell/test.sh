#!/usr/bin/env bash
# Runs the linter and the tests of one backend (KERAS_BACKEND; JAX by default)
# in an environment of its own. Arguments go to pytest, in place of the tests
# that are run otherwise:
#
#   bash shell/test.sh
#   bash shell/test.sh keras_tp/distribution -k layout
#   KERAS_BACKEND=torch bash shell/test.sh
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
export KERAS_BACKEND=${KERAS_BACKEND:-jax}
export TF_CPP_MIN_LOG_LEVEL=${TF_CPP_MIN_LOG_LEVEL:-3}
export XLA_FLAGS=${XLA_FLAGS:---xla_force_host_platform_device_count=8}
case $KERAS_BACKEND in
torch)
    make_environment .venv-torch torch,hub,test
    tests=(keras_tp/backend integration_tests/torch_processes_test.py)
    # One process per device: threads of several would fight for the cores.
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
    ;;
tensorflow)
    make_environment .venv-test jax,hub,test
    tests=(keras_tp)
    for name in bad_input collectives contamination parity public_api \
        residence saving train_lm training; do
        tests+=("integration_tests/${name}_test.py")
    done
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
