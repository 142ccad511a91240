#!/usr/bin/env bash
# Starts Ray on this host, runs examples/engines/train.py by the program that
# `launch --print-env ray` prints, on torch by Ray Train's `TorchTrainer` too, and
# prints a table of what was tried. Arguments are backends, by default all:
#
#   bash shell/engines/ray.sh
#   bash shell/engines/ray.sh torch
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
need_python ray "ray[train]==2.60.0"
folder=$(mktemp -d /tmp/keras_tp_ray.XXXXXX)
port=$("$PYTHON" -c '
import socket
print(socket.create_server(("127.0.0.1", 0)).getsockname()[1])')
export RAY_AUTH_MODE=disabled RAY_ADDRESS=127.0.0.1:$port
"$PYTHON" -m ray.scripts.scripts start --head --block --port $port \
    --node-ip-address 127.0.0.1 --num-cpus "${KERAS_TP_ENGINE_PROCESSES:-4}" \
    --include-dashboard false --temp-dir "$folder" --disable-usage-stats \
    >"$folder/log" 2>&1 &
started=$!
trap 'kill $started 2>/dev/null || true; wait $started || true; rm -rf "$folder"' EXIT
until grep -q "Ray runtime started" "$folder/log"; do
    kill -0 $started || { cat "$folder/log"; exit 1; }
    sleep 0.5
done
"$PYTHON" -m integration_tests.engines ray "$@"
if [ $# = 0 ] || [[ " $* " == *" torch "* ]]; then
    "$PYTHON" -m integration_tests.engines "ray train" torch
fi
