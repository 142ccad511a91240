#!/usr/bin/env bash
# Builds the documentation site, and runs every snippet of its pages and every
# notebook in examples/ on all three backends, or on KERAS_BACKEND. CI runs each
# guide on one of them, and one notebook.
#
#   bash shell/test_docs.sh
#   KERAS_BACKEND=torch bash shell/test_docs.sh
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash shell/docs.sh -E
for backend in ${KERAS_BACKEND:-jax tensorflow torch}; do
    KERAS_BACKEND=$backend KERAS_TP_SLOW=1 bash shell/test.sh \
        integration_tests/{guides,notebooks,readme}_test.py -k 'not site_builds'
done
