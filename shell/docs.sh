#!/usr/bin/env bash
# Builds the documentation site in an environment of its own. A warning is an
# error. The pages are then in docs/_build/html; open index.html there.
# Arguments go to sphinx-build:
#
#   bash shell/docs.sh
#   bash shell/docs.sh -E            # reads all pages again
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
make_environment .venv-docs jax,docs
# The reference is read from the docstrings, so keras_tp is imported.
export KERAS_BACKEND=jax TF_CPP_MIN_LOG_LEVEL=3
# The source is the whole repository: some pages are beside docs/.
exec "$PYTHON" -m sphinx --fail-on-warning --keep-going --nitpicky --quiet \
    --conf-dir docs "$@" . docs/_build/html
