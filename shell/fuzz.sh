#!/usr/bin/env bash
# Searches for damage of files, and kills of saves, that lose or change a value:
#
#   bash shell/fuzz.sh [--backend B] [--seed S] [--count N]
#
# Without a backend, on all three. N files of each format are damaged, and N
# saves of each kind killed, in one process and in two. Without a count, 1000
# and 200. It ends with 1 if something was found.
set -uo pipefail
backends="jax tensorflow torch" seed=1 count=
while [ $# -gt 0 ]; do
    case $1 in
    --backend) backends=$2 ;;
    --seed) seed=$2 ;;
    --count) count=$2 ;;
    *)
        echo "Usage: bash shell/fuzz.sh [--backend B] [--seed S] [--count N]." \
            "Received: $1" >&2
        exit 2
        ;;
    esac
    shift 2 || exit 2
done
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
make_environment .venv-test jax,tensorflow,torch,hub,test || exit 1
export TF_CPP_MIN_LOG_LEVEL=${TF_CPP_MIN_LOG_LEVEL:-3} OMP_NUM_THREADS=1
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
failed=0
for backend in $backends; do
    export KERAS_BACKEND=$backend
    # Virtual devices, which the runs of several processes set themselves.
    flags="${XLA_FLAGS:-} --xla_force_host_platform_device_count=2"
    XLA_FLAGS=$flags KERAS_TP_CPU_DEVICES=2 "$PYTHON" \
        integration_tests/fuzz_files.py \
        --seed "$seed" --count "${count:-1000}" || failed=1
    XLA_FLAGS=$flags KERAS_TP_CPU_DEVICES=2 "$PYTHON" \
        integration_tests/fuzz_kills.py \
        --seed "$seed" --count "${count:-200}" || failed=1
    "$PYTHON" integration_tests/fuzz_kills.py --processes 2 \
        --seed "$seed" --count "${count:-200}" || failed=1
done
exit $failed
