#!/usr/bin/env bash
# Runs the linter and the tests of all backends in environments of their own.
# KERAS_BACKEND picks one of them; arguments go to pytest, in place of the tests
# that are run otherwise (on JAX by default):
#
#   bash shell/test.sh
#   KERAS_BACKEND=torch bash shell/test.sh
#   KERAS_BACKEND=torch KERAS_TP_TORCH_DEVICES=4 bash shell/test.sh
#   bash shell/test.sh keras_tp/distribution -k layout
#
# After KERAS_TP_TEST_MINUTES, if it is set, tests that still run are ended, and
# print where each of their threads is.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
make_environment .venv-test jax,tensorflow,torch,hub,test
export TF_CPP_MIN_LOG_LEVEL=${TF_CPP_MIN_LOG_LEVEL:-3}
if [ $# -gt 0 ]; then
    export KERAS_BACKEND=${KERAS_BACKEND:-jax}
fi
if [ "${KERAS_BACKEND:-}" = jax ] && [ "${KERAS_TP_SLOW:-}" != 1 ]; then
    # XLA's compiler takes most of the time on JAX. Without these optimizations
    # of CPU code, tests take about half or a third. The partitioner, which
    # inserts the collectives, is not affected.
    export JAX_DISABLE_MOST_OPTIMIZATIONS=1
    export XLA_FLAGS="${XLA_FLAGS:-} --xla_cpu_use_fusion_emitters=false"
fi
if [ "${KERAS_BACKEND:-}" = torch ]; then
    # One process per device: the threads of several would fight for the cores.
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
fi
if [ $# -gt 0 ]; then
    exec "$PYTHON" -m pytest "$@"
fi
"$PYTHON" -m ruff check .
"$PYTHON" -m ruff format --check .
case ${KERAS_BACKEND:-} in
'')
    # Three at a time on two cores, as tests of processes wait much; those of
    # TensorFlow and torch in halves. The output of each follows its end.
    logs=$(mktemp -d)
    trap 'rm -rf "$logs"' EXIT
    end=$(($(date +%s) + 60 * ${KERAS_TP_TEST_MINUTES:-0}))
    ulimit -c 0
    printf '%s\n' jax tensorflow-models torch-processes torch_xla \
        tensorflow-package torch-others |
        xargs -P 3 -I{} bash -c '
        left=0
        if [ "${KERAS_TP_TEST_MINUTES:-0}" != 0 ]; then
            left=$(($3 - $(date +%s)))
            left=$((left > 1 ? left : 1))
        fi
        KERAS_BACKEND=${1%%-*} KERAS_TP_TESTS=${1#*-} \
            timeout --signal=ABRT --kill-after=60 $left \
            bash shell/test.sh >"$2/$1" 2>&1
        code=$?
        echo "== $1"
        cat "$2/$1"
        exit $code' _ {} "$logs" "$end"
    ;;
torch_xla)
    # Its environment is made in a few minutes, if there is room for it.
    free=$(($(df --output=avail -k . | tail -n 1) / 2 ** 20))
    if [ ! -e .venv-xla/installed ] && [ "$free" -lt 15 ]; then
        echo "Not run: torch_xla needs 15 GB of disk, and $free are free."
    elif ! bash shell/test_xla.sh install; then
        echo "Not run: torch_xla could not be installed."
    else
        bash shell/test_xla.sh
    fi
    ;;
torch)
    # What needs several devices runs in the processes that one of these
    # launches: KERAS_TP_TORCH_DEVICES of them, 2 by default.
    processes=(integration_tests/torch_{launch,processes}_test.py)
    others=(
        keras_tp/backend keras_tp/{launch,startup}_test.py
        integration_tests/{benchmark,collective_calls,command_line}_test.py
        integration_tests/conformance_test.py
        integration_tests/{engines,examples,guides}_test.py
        integration_tests/{fuzz_files,keras_suite,one_device}_test.py
        integration_tests/{notebooks,output,planning,readme,stuck,train_lm}_test.py
    )
    case ${KERAS_TP_TESTS:-} in
    processes) others=() ;;
    others) processes=() ;;
    esac
    "$PYTHON" -m pytest --durations=25 "${others[@]}" "${processes[@]}"
    ;;
*)
    folders=(keras_tp integration_tests)
    case ${KERAS_TP_TESTS:-} in
    package) folders=(keras_tp) ;;
    models) folders=(integration_tests) ;;
    esac
    "$PYTHON" -m pytest --durations=25 "${folders[@]}"
    ;;
esac
