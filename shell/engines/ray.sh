#!/usr/bin/env bash
# Starts Ray on this host, runs examples/engines/train.py by the program that
# `launch --print-env ray` prints, and prints a table of what was tried. Arguments
# are backends, by default all. PYTHON is a Python that has ray, keras_tp and the
# backends:
#
#   PYTHON=.venv-ray/bin/python bash shell/engines/ray.sh
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
python=${PYTHON:-.venv-test/bin/python}
if ! "$python" -c 'import ray' 2>/dev/null; then
    echo "skipped: ray (tried with 2.60.0) is not installed beside $python"
    exit 0
fi
folder=$(mktemp -d /tmp/keras_tp_ray.XXXXXX)
export RAY_AUTH_MODE=disabled RAY_ADDRESS=127.0.0.1:26399
"$python" -m ray.scripts.scripts start --head --block --port 26399 \
    --node-ip-address 127.0.0.1 --num-cpus "${KERAS_TP_ENGINE_PROCESSES:-4}" \
    --include-dashboard false --temp-dir "$folder" --disable-usage-stats \
    >"$folder/log" 2>&1 &
started=$!
trap 'kill $started; wait $started || true; rm -rf "$folder"' EXIT
until grep -q "Ray runtime started" "$folder/log"; do
    kill -0 $started || { cat "$folder/log"; exit 1; }
    sleep 0.5
done
"$python" -m integration_tests.engines ray "$@"
