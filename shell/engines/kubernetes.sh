#!/usr/bin/env bash
# Compares the manifests that `launch --print-env k8s` prints with the schemas of
# Kubernetes, runs the command of each pod here with its environment, and prints a
# table of what was tried. There is no cluster. Arguments are backends, by default
# all.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
need_python kubernetes_validate kubernetes-validate==1.31.0
exec "$PYTHON" -m integration_tests.engines k8s "$@"
