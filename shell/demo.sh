#!/usr/bin/env bash
# Trains a small language model on 4 virtual devices, in an environment of its
# own. Options of examples/train_lm.py may follow:
#
#   bash shell/demo.sh
#   bash shell/demo.sh --mesh 2x2 --size small
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
make_environment .venv-demo jax,hub
devices=(--devices 4)
for option in "$@"; do
    case $option in --devices* | --mesh*) devices=() ;; esac
done
exec "$PYTHON" examples/train_lm.py "${devices[@]}" "$@"
