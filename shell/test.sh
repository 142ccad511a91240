#!/usr/bin/env bash
# Runs the linter and the tests of all three backends, one after the other, in
# an environment of its own. KERAS_BACKEND picks one of them; arguments go to
# pytest, in place of the tests that are run otherwise (on JAX by default):
#
#   bash shell/test.sh
#   KERAS_BACKEND=torch bash shell/test.sh
#   KERAS_BACKEND=torch KERAS_TP_TORCH_DEVICES=4 bash shell/test.sh
#   bash shell/test.sh keras_tp/distribution -k layout
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
make_environment .venv-test jax,tensorflow,torch,hub,test
export TF_CPP_MIN_LOG_LEVEL=${TF_CPP_MIN_LOG_LEVEL:-3}

test_backend() {
    echo "== $1"
    local settings=(KERAS_BACKEND="$1")
    # One process per device: the threads of several would fight for the cores.
    [ "$1" != torch ] || settings+=(OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}")
    env "${settings[@]}" "$PYTHON" -m pytest "${@:2}"
}

if [ $# -gt 0 ]; then
    test_backend "${KERAS_BACKEND:-jax}" "$@"
    exit
fi
"$PYTHON" -m ruff check .
"$PYTHON" -m ruff format --check .
failed=()
for backend in ${KERAS_BACKEND:-jax tensorflow torch}; do
    tests=(keras_tp integration_tests)
    # What needs several devices runs in the processes that one of these
    # launches: KERAS_TP_TORCH_DEVICES of them, 2 by default.
    [ "$backend" != torch ] || tests=(
        keras_tp/backend keras_tp/launch_test.py
        integration_tests/benchmark_test.py
        integration_tests/planning_test.py
        integration_tests/torch_launch_test.py
        integration_tests/torch_processes_test.py
        integration_tests/train_lm_test.py
    )
    test_backend "$backend" "${tests[@]}" || failed+=("$backend")
done
if [ ${#failed[@]} -gt 0 ]; then
    echo "Tests failed on: ${failed[*]}" >&2
    exit 1
fi
