#!/usr/bin/env bash
# Trains a small language model on 4 devices, in an environment of its own.
# Options of examples/train_lm.py may follow:
#
#   bash shell/demo.sh
#   bash shell/demo.sh --mesh 2x2 --size small
#   bash shell/demo.sh --backend torch --devices 2
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
devices=(--devices 4) backend=jax previous=
for option in "$@"; do
    case $option in
    --devices* | --mesh*) devices=() ;;
    --backend=*) backend=${option#*=} ;;
    esac
    [ "$previous" != --backend ] || backend=$option
    previous=$option
done
make_environment ".venv-demo-$backend" "$backend,hub"
exec "$PYTHON" examples/train_lm.py "${devices[@]}" "$@"
