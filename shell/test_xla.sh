#!/usr/bin/env bash
# Runs the tests of the backend on torch_xla in an environment of its own, of
# about 7 GB: torch_xla needs an older torch. The devices are virtual.
#
#   bash shell/test_xla.sh               # 2, 4 and 8 of them
#   bash shell/test_xla.sh 4 keras_tp/backend/torch_xla -k adam
#   bash shell/test_xla.sh install       # makes the environment only
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
make_environment .venv-xla torch-xla "pytest" torch==2.9.0 torch_xla==2.9.0
export KERAS_BACKEND=torch KERAS_TP_BACKEND=torch_xla
export PJRT_DEVICE=CPU OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
if ! "$PYTHON" -c 'import keras_hub' 2>/dev/null; then
    # Its text functions need TensorFlow, which the tests do without.
    install_packages kagglehub huggingface_hub pyyaml regex tokenizers
    install_packages --no-deps keras-hub
fi
if [ "${1:-}" = install ]; then
    exit
fi
if [ $# -gt 0 ]; then
    export CPU_NUM_DEVICES=$1
    shift
    exec "$PYTHON" -m pytest "$@"
fi
for count in 2 4; do
    "$PYTHON" -m keras_tp.testing --backend torch_xla --devices "$count"
done
for count in 4 8; do
    CPU_NUM_DEVICES=$count "$PYTHON" -m pytest keras_tp/backend/torch_xla
done
CPU_NUM_DEVICES=4 "$PYTHON" -m pytest keras_tp/backend/*_test.py
