#!/usr/bin/env bash
# Measures what keras_tp costs on one CUDA device, against plain Keras, in
# about eight minutes; writes JSON files into a folder:
#
#   bash shell/gpu.sh [FOLDER]                     # ./gpu by default
#   PYTHON=python3.12 WHEELS=wheels bash shell/gpu.sh
#   KERAS_TP_GPU_BACKENDS=jax bash shell/gpu.sh
#
# PYTHON has JAX and torch with CUDA. What else is needed (keras, keras-hub)
# comes from the wheels in the folder WHEELS, without a network, or is there.
# On a machine without a CUDA device it says so and ends with 0.
set -euo pipefail
folder=$(realpath "${1:-gpu}")
wheels=${WHEELS:+$(realpath "$WHEELS")}
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-python3}
backends=${KERAS_TP_GPU_BACKENDS:-jax,torch}
if ! nvidia-smi -L 2>/dev/null; then
    echo "No CUDA device is here (nvidia-smi -L finds none); nothing was" \
        "measured."
    exit 0
fi
mkdir -p "$folder"
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
if [ -n "$wheels" ]; then
    site=$(mktemp -d)
    trap 'rm -rf "$site"' EXIT
    "$python" -m pip install --quiet --no-index --no-deps --no-compile \
        --target "$site" "$wheels"/*.whl
    PYTHONPATH=$site:$PYTHONPATH
fi
"$python" benchmarks/gpu.py --backends "$backends" \
    --json "$folder/gpu_${backends/,/_}.json"
case $backends in
*torch*)
    # The decoder of torch itself, split by `parallelize_module`, beside it.
    for options in "" --jit; do
        "$python" benchmarks/step_time.py --backend torch --devices 1 \
            --hidden 1024 --rounds 12 --steps 20 $options \
            --json "$folder/step_time_torch$options.json"
    done
    ;;
esac
