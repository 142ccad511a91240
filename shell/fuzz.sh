#!/usr/bin/env bash
# Searches for values that are changed or lost in silence, and for runs that hang:
#
#   bash shell/fuzz.sh [--backend B] [--what W] [--seed S] [--count N]
#
# Without a backend, on all three. W is one or more of
#
#   files  N files of each format are damaged, by default 1000
#   kills  N saves of each kind are killed, by default 200, in one process and
#          in two
#   stuck  one of two processes fails, hangs or is stopped in each case, once
#   ops    each function of Keras that takes tensors, with each dim split
#
# and without it all. The last two try every case, and take no seed. It ends with
# 1 if something was found.
set -uo pipefail
backends="jax tensorflow torch" what="files kills stuck ops" seed=1 count=
while [ $# -gt 0 ]; do
    case $1 in
    --backend) backends=$2 ;;
    --what) what=$2 ;;
    --seed) seed=$2 ;;
    --count) count=$2 ;;
    *)
        echo "Usage: bash shell/fuzz.sh [--backend B] [--what W] [--seed S]" \
            "[--count N]. Received: $1" >&2
        exit 2
        ;;
    esac
    shift 2 || exit 2
done
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
make_environment .venv-test jax,tensorflow,torch,hub,test || exit 1
export TF_CPP_MIN_LOG_LEVEL=${TF_CPP_MIN_LOG_LEVEL:-3} OMP_NUM_THREADS=1
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}

# With virtual devices, which the runs of several processes set themselves.
on_two_devices() {
    XLA_FLAGS="${XLA_FLAGS:-} --xla_force_host_platform_device_count=2" \
        KERAS_TP_CPU_DEVICES=2 "$@"
}

files() {
    on_two_devices "$PYTHON" integration_tests/fuzz_files.py \
        --seed "$seed" --count "${count:-1000}"
}

kills() {
    on_two_devices "$PYTHON" integration_tests/fuzz_kills.py \
        --seed "$seed" --count "${count:-200}"
    local found=$?
    "$PYTHON" integration_tests/fuzz_kills.py --processes 2 \
        --seed "$seed" --count "${count:-200}" && return $found
}

stuck() {
    "$PYTHON" integration_tests/stuck.py --backend "$KERAS_BACKEND"
}

ops() {
    local tests="integration_tests/ops_test.py integration_tests/ops_layers_test.py"
    if [ "$KERAS_BACKEND" = torch ]; then
        KERAS_TP_SLOW=1 "$PYTHON" -m keras_tp.launch --devices 2 \
            integration_tests/torch_ranks.py $tests
    else
        KERAS_TP_SLOW=1 "$PYTHON" -m pytest -q $tests
    fi
}

failed=0
for backend in $backends; do
    export KERAS_BACKEND=$backend
    for search in $what; do
        case $search in
        files | kills | stuck | ops) "$search" || failed=1 ;;
        *)
            echo "--what must be of: files kills stuck ops. Received: $search" >&2
            exit 2
            ;;
        esac
    done
done
exit $failed
